"""The files of a partition: segments, indexes, checkpoints."""
