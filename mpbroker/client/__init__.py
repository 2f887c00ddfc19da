"""A client for Kafka brokers: one core for producer, consumer, admin and tools."""
