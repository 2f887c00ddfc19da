"""Replace the whole broker by another version, with its clients connected."""
