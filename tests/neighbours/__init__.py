"""Hostile clients beside a well-behaved one, which must not notice them."""
