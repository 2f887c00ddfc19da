"""Tables of a lake: commit batches to them, maintain them, open them by format."""
