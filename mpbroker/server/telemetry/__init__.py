"""Metrics that clients push, and the receiver that gets them (KIP-714)."""
