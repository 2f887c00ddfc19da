"""The groups of a cluster: their shards, their records, offsets in transactions."""
