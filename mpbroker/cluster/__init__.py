"""A cluster of brokers: PostgreSQL keeps the order of records, S3 etc. their bytes.

Under construction: see docs/cluster.md. Needs ``pip install mpbroker-server[cluster]``.
Only a broker of a cluster imports this package, in separate processes.
"""
