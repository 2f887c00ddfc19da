"""Let producers to shared topics have several requests in flight, in order."""
