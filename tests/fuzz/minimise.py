"""Make the input of a failure small: leave out what it does not need.

Source: Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tests.fuzz.bent import Stream

Volley = list[Stream]
T = TypeVar("T")


class OutOfTriesError(Exception):
    """There are no tries left; what was found so far counts."""


def minimise(
    volleys: Sequence[Volley], fails: Callable[[list[Volley]], bool], tries: int = 150
) -> list[Volley]:
    """Return the smallest input found that still fails; nothing if none does.

    First whole volleys are left out, then requests of those that remain.

    Args:
        volleys: what was sent, the failure's last.
        fails: plays an input, and returns whether it fails.
        tries: how often it may do so.
    """
    smallest = _shortest_end(volleys, fails)
    if not smallest:
        return []

    def still_fails(some: list[Volley]) -> bool:
        nonlocal tries
        if tries <= 0:
            raise OutOfTriesError
        tries -= 1
        return fails(some)

    with contextlib.suppress(OutOfTriesError):
        for smaller in _reductions(smallest, still_fails):
            smallest = smaller
        whole = smallest
        places = [
            (v, s, f)
            for v, volley in enumerate(whole)
            for s, stream in enumerate(volley)
            for f in range(len(stream.shots))
        ]
        for kept in _reductions(places, lambda some: still_fails(_only(whole, some))):
            smallest = _only(whole, kept)
    return smallest


def _shortest_end(
    volleys: Sequence[Volley], fails: Callable[[list[Volley]], bool]
) -> list[Volley]:
    """Return so many of the last volleys as fail, by powers of two."""
    count = 1
    while True:
        end = list(volleys[-count:])
        if fails(end):
            return end
        if count >= len(volleys):
            return []
        count *= 2


def _reductions(parts: list[T], fails: Callable[[list[T]], bool]) -> Iterator[list[T]]:
    """Yield ever smaller lists that fail."""
    size = max(1, len(parts) // 2)
    while len(parts) > 1:
        for at in range(0, len(parts), size):
            rest = parts[:at] + parts[at + size :]
            if rest and fails(rest):
                parts = rest
                yield parts
                break
        else:
            if size == 1:
                return
            size = max(1, size // 2)
        size = min(size, max(1, len(parts) // 2))


def _only(volleys: list[Volley], places: list[tuple[int, int, int]]) -> list[Volley]:
    """Return volleys with some of their requests, without what is empty then."""
    kept = set(places)
    found = []
    for v, volley in enumerate(volleys):
        streams = []
        for s, stream in enumerate(volley):
            shots = [each for f, each in enumerate(stream.shots) if (v, s, f) in kept]
            if shots:
                streams.append(stream._replace(shots=shots))
        if streams:
            found.append(streams)
    return found
