"""`mpbroker produce` and `mpbroker consume`."""
