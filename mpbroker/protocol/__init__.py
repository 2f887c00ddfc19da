"""The bytes of Kafka's protocol: requests, responses, records."""
