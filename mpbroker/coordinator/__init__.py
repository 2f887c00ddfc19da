"""Coordinate consumer groups, their offsets and transactions, in one process."""
