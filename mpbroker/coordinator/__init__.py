"""The coordinator's process: consumer groups, their offsets, and transactions."""
