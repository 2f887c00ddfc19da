"""Partition logs: Kafka's files, which any process of the broker may append to."""
