"""`mpbroker restore` and `mpbroker store`: work on a remote store."""
