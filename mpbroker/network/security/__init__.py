"""Serve listeners with TLS or SASL. No PLAINTEXT listener imports this package."""
