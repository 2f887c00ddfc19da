"""Execute APIs, one module for each: it takes a request and returns a response."""
