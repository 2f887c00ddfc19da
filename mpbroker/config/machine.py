"""Defaults that are computed from the machine: from its cores and its environment.

A row of the broker's table has such a default as a Computed: a function, and its rule
in words. The documentation of the key tells the rule; `mpbroker config explain` also
tells the value on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

from mpbroker.base.config_def import ConfigError, ConfigKey

T = TypeVar("T")


def _say_nothing(sentence: str) -> None:
    """Ignore a warning."""


class Machine:
    """The facts about a machine from which defaults are computed.

    Attributes:
        cores: the number of cores that the broker may keep busy.
        environ: the environment variables.
        warn: a function, called with a sentence about each variable that cannot be
            used.
    """

    __slots__ = ("cores", "environ", "warn")

    def __init__(
        self,
        cores: int,
        environ: Mapping[str, str],
        warn: Callable[[str], None] = _say_nothing,
    ) -> None:
        self.cores = cores
        self.environ = environ
        self.warn = warn

    def first(
        self, variables: Iterable[str], read: Callable[[str], T], otherwise: T
    ) -> T:
        """Return the value of the first variable that is set and can be used.

        Args:
            read: turns a variable's text into the value. If it raises ConfigError, that
                is only a warning: all programs of a machine share the variables, so
                they must not keep a broker from starting.
            otherwise: the value if no variable can be used.
        """
        for variable in variables:
            text = self.environ.get(variable)
            if text:
                try:
                    return read(text)
                except ConfigError as error:
                    self.warn(f"{variable} is not used: {error}")
        return otherwise


class Computed(Generic[T]):
    """A default that is computed from the machine.

    Args:
        value: a function that computes it from the machine and the key.
        rule: says the same in words, as the end of the sentence "Default: ...".
    """

    __slots__ = ("rule", "value")

    def __init__(self, value: Callable[[Machine, ConfigKey], T], rule: str) -> None:
        self.value = value
        self.rule = rule


def share_of_cores(cores: int, *, at_least: int, at_most: int) -> Computed[int]:
    """Return a computed default: a process for every ``cores`` cores, within limits."""

    def value(machine: Machine, key: ConfigKey) -> int:
        return min(at_most, max(at_least, machine.cores // cores))

    share = {1: "the cores available", 2: "half the cores available"}[cores]
    return Computed(value, f"{share}, at least {at_least} and at most {at_most}")


def of_variables(otherwise: T, *variables: str) -> Computed[T]:
    """Return a default that an environment variable may set.

    Args:
        otherwise: the default if no variable can be used.
        variables: names of variables; the first that can be used counts.
    """

    def value(machine: Machine, key: ConfigKey) -> T:
        # parse() returns the type that the key declares, as `otherwise` has it.
        return machine.first(variables, key.parse, otherwise)  # type: ignore[arg-type]

    named = ", else ".join(f"${variable}" for variable in variables)
    return Computed(value, f"{named}, else {otherwise}")


def _log_dirs(machine: Machine, key: ConfigKey) -> tuple[str, ...]:
    environ = machine.environ
    # systemd sets STATE_DIRECTORY, a colon-separated list, for StateDirectory=.
    state = environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if state:
        return (state,)
    data_home = environ.get("XDG_DATA_HOME", "")
    if not data_home and environ.get("HOME"):
        data_home = os.path.join(environ["HOME"], ".local", "share")
    return (os.path.join(data_home or "/var/lib", "mpbroker"),)


# Not Kafka's default, /tmp/kafka-logs: many systems delete what is in /tmp at boot.
DEFAULT_LOG_DIRS = Computed(
    _log_dirs,
    "$STATE_DIRECTORY, which systemd sets, else mpbroker in $XDG_DATA_HOME, else"
    " ~/.local/share/mpbroker, else (without a home directory) /var/lib/mpbroker",
)
