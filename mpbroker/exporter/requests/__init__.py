"""Requests as they are served: the request log, its counts, percentiles of times."""
