"""Run pipelines that a TOML file describes.

A pipeline writes a topic to a table, aggregates it by windows, sends a table's rows to
a topic, or makes a page from a broker's request log.
"""
