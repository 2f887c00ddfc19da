"""Execute APIs, one module for each: a request message in, a response message out."""
