"""Coordinate consumer groups of both protocols, and keep their committed offsets."""
