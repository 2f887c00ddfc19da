"""Consumer groups of both protocols, and their committed offsets."""
