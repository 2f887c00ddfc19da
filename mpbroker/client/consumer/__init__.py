"""The consumer: fetching, positions, membership of a group."""
