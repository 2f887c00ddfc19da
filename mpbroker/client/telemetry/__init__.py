"""A client's metrics, and their way to brokers that ask for them (KIP-714)."""
