"""The gate: all tests, then those that failed once more, alone. See __main__.py."""
