"""`mpbroker ctl` and its commands."""
