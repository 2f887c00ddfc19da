"""Produce: validation, appends, and waiting for the disk."""
