"""How many processes a broker can have: the limits of num.io.threads and its like.

Shared memory has room for so many; and processors are counted over all listeners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from mpbroker.base.config_def import ConfigError, Validator, between
from mpbroker.ipc.layout import MAX_HANDLERS, MAX_PROCESSORS

HANDLERS_KEY: Final = "num.io.threads"
PROCESSORS_KEY: Final = "num.network.threads"


def pool_validators(
    listeners: Sequence[str], own: Mapping[str, int], control_handlers: int = 0
) -> dict[str, Validator]:
    """Return what the two keys accept, given the listeners there are.

    Args:
        listeners: their names.
        own: the processors of those that do not follow num.network.threads, by name.
        control_handlers: 1 if there is a control plane, whose handler is another.

    Raises:
        ConfigError: the listeners' own numbers leave too few for the others.
    """
    following = [name for name in listeners if name not in own]
    left = MAX_PROCESSORS - sum(own.values())
    if left < len(following):
        raise ConfigError(
            f"listener.name.NAME.{PROCESSORS_KEY}: {sum(own.values())} processors for"
            f" {len(own)} of {len(listeners)} listeners; at most {MAX_PROCESSORS} can"
            " run over all listeners, at least 1 for each; lower them"
        )
    return {
        HANDLERS_KEY: between(1, MAX_HANDLERS - control_handlers),
        PROCESSORS_KEY: _processors(left // max(1, len(following)), len(listeners)),
    }


def _processors(highest: int, listeners: int) -> Validator:
    plain = between(1, highest)
    if listeners == 1:
        return plain
    return Validator(
        f"{plain.limit}, since {listeners} listeners share at most {MAX_PROCESSORS}"
        f" processors (see listener.name.NAME.{PROCESSORS_KEY})",
        plain.accepts,
    )
