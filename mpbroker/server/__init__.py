"""Execute requests: dispatch, authorization, handlers, waiting, answers."""
