"""Counters, in words that outlive the process that counts."""
