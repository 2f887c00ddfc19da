"""Serve share groups (KIP-932): their partitions' states, sessions and requests."""
