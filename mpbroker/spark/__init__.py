"""The Spark wing: topics and archived segments as data sources, and pipelines.

Needs ``pip install mpbroker[spark]`` and a Java runtime; nothing of the broker.
"""
