"""Listeners with TLS or SASL; no PLAINTEXT listener imports it."""
