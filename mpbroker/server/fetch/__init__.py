"""Execute Fetch: keep sessions, read records, and wait for more."""
