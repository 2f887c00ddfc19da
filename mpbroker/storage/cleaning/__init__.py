"""Retention and compaction: what the housekeeper removes and rewrites."""
