"""Execute requests in handler processes, from authorization to the answer."""
