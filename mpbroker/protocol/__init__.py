"""Kafka's wire protocol as bytes: requests, responses and record batches."""
