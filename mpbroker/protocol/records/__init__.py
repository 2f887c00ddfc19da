"""Read, check, write and compress record batches."""
