"""The parent process of a broker: start, watch, repair, resize, replace, stop."""

from typing import Final

# The environment variable of a program that takes over from another; see takeover.py.
TAKEOVER_VARIABLE: Final = "_MPBROKER_TAKEOVER"
