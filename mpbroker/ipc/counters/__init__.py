"""Counted events, in words that outlive the process that counted."""
