"""Decide whether the sender of a request has the permissions that it needs."""
