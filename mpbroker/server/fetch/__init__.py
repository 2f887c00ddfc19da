"""Fetch: sessions, reads, and waiting for records."""
