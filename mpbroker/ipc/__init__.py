"""Shared memory: layout, segments, rings, locks, wake-ups."""
