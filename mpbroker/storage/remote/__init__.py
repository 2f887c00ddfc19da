"""Remote (tiered) storage: closed segments as objects in a store like S3 (KIP-405)."""
