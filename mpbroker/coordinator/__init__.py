"""Coordinate consumer and share groups, offsets and transactions, in one process."""
