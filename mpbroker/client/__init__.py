"""A client: sans-IO connection, blocking transport, and what the CLI needs of them."""
