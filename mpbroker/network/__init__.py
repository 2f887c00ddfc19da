"""Sockets: acceptors, processors, framing, and the channel of requests."""
