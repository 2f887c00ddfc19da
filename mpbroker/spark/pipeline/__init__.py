"""Pipelines that a TOML file describes: topic to lake, windows, lake to topic."""
