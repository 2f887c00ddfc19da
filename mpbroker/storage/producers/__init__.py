"""The producers of a log: their sequences, epochs and open transactions."""
