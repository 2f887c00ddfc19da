"""Figures of what a node does for its cluster, for the exporter and `ctl status`."""
