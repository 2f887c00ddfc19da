"""Connections that outlive their process: hand-over, succession, the keeper."""
