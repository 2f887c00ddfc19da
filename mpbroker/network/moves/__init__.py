"""Connections that change their process: hand-over, succession, the keeper."""
