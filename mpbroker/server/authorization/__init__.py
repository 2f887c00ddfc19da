"""Whether the sender of a request may do what it asks for."""
