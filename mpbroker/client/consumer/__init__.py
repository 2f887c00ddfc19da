"""The consumer: it fetches records, keeps positions, and is a member of a group."""
