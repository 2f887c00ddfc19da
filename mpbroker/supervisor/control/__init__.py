"""The control socket's server: the commands of `mpbroker ctl`."""
