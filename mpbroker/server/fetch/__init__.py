"""Fetch: sessions, reads, and waiting for data."""
