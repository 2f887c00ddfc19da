"""The commands that run Spark: pipelines and SQL."""
