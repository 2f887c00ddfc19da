"""Move bytes between clients and handlers: sockets, framing, RequestChannel."""
