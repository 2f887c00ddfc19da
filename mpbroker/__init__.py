"""A broker that speaks the Kafka protocol, as a family of Python processes."""

from typing import Final

__version__: Final = "0.1.0.dev0"
