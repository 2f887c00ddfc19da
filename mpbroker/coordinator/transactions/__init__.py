"""Coordinate transactions: their ids, their states, and the markers that end them."""
