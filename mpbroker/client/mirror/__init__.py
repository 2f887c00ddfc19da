"""Copy topics from a running cluster to a running mpbroker, with the same offsets."""
