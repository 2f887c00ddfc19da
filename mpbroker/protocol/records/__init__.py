"""Record batches: read, checked, written, compressed."""
