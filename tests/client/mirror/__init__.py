"""Mirrors of whole topics, between running brokers."""
