"""Partition logs that any process may append to."""
