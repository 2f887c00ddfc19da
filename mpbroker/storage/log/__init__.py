"""One partition: load, append, read, make durable."""
