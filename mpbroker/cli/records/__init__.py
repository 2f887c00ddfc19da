"""`mpbroker produce` and `mpbroker consume`: records in, records out."""
