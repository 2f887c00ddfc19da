"""One module an API: message in, message out, without sockets, clock or process."""
