"""Move connections to another process: hand-over, succession, the keeper."""
