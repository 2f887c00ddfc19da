"""Client quotas: how much a client used, and how long it must wait."""
