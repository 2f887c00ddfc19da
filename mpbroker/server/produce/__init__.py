"""Execute Produce: validate batches, append them, and wait for the disk."""
