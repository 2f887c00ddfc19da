"""ShareConsumer: a member of a share group, its sessions with brokers, its settings."""
