"""Measure a client's metrics, and push them to brokers that ask for them (KIP-714)."""
