"""Receive the metrics that clients push (KIP-714)."""
