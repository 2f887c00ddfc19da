"""How clients' attempts to prove who they are have ended, counted by processors.

A processor adds to its own words, and its successors go on with them; readers add up
all processors there ever were. A word an AuthenticationResult, and further:

    24    re-authentication  ns, from the first step to the last, of all together
    25    the longest        ns
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NamedTuple

from mpbroker.ipc.layout import (
    AUTHENTICATION_TABLES,
    AUTHENTICATION_WORDS,
    MAX_PROCESSORS,
)


class AuthenticationResult(IntEnum):
    """How an attempt ended; its name in lower case is what metrics call it.

    All but the first three and SESSION_EXPIRED ended the connection before a request.
    """

    HANDSHAKE = 0  # TLS is agreed upon
    AUTHENTICATED = 1
    REAUTHENTICATED = 2
    SESSION_EXPIRED = 3  # a request came after connections.max.reauth.ms
    NOT_TLS = 4  # the first bytes were no TLS
    TLS_VERSION = 5  # no version that both sides know
    TLS_CIPHER = 6  # no cipher suite that both sides know
    TLS_CERTIFICATE = 7  # a client's certificate is missing, or not accepted
    TLS_REFUSED_BY_CLIENT = 8  # it sent an alert: mostly, it does not trust ours
    TLS_OTHER = 9
    NOT_SASL = 10  # a request that is none of the three, or a step out of order
    MECHANISM = 11  # not among sasl.enabled.mechanisms
    CREDENTIALS = 12  # wrong password, unknown user, token not valid
    TOO_LARGE = 13  # sasl.server.max.receive.size
    TIMEOUT = 14  # not done in time
    GONE = 15  # the peer went away in the middle
    UNAVAILABLE = 16  # we could not judge: no room for the principal, no keys


_LATENCY_SUM: Final = 24
_LATENCY_MAX: Final = 25

assert len(AuthenticationResult) <= _LATENCY_SUM < _LATENCY_MAX < AUTHENTICATION_WORDS


class ReauthenticationLatency(NamedTuple):
    """How long clients took to prove again who they are."""

    times: int
    sum_ns: int
    max_ns: int


class AuthenticationCounts:
    """One processor's counts."""

    def __init__(self, processor: int, words: memoryview) -> None:
        self._words: Final = words
        self._first: Final = AUTHENTICATION_TABLES + processor * AUTHENTICATION_WORDS

    def count(self, result: AuthenticationResult) -> None:
        self._words[self._first + result] += 1

    def count_again(self, took_ns: int) -> None:
        """A client has authenticated again."""
        words, first = self._words, self._first
        words[first + AuthenticationResult.REAUTHENTICATED] += 1
        words[first + _LATENCY_SUM] += took_ns
        words[first + _LATENCY_MAX] = max(took_ns, words[first + _LATENCY_MAX])


def read_authentications(
    words: memoryview, processors: Iterable[int] = range(MAX_PROCESSORS)
) -> dict[AuthenticationResult, int]:
    """Add up the counts of some processors; all results are there."""
    firsts = [
        AUTHENTICATION_TABLES + each * AUTHENTICATION_WORDS for each in processors
    ]
    return {
        result: sum(words[first + result] for first in firsts)
        for result in AuthenticationResult
    }


def read_reauthentication(
    words: memoryview, processors: Iterable[int] = range(MAX_PROCESSORS)
) -> ReauthenticationLatency:
    """How long it took with some processors."""
    times = total = longest = 0
    for each in processors:
        first = AUTHENTICATION_TABLES + each * AUTHENTICATION_WORDS
        times += words[first + AuthenticationResult.REAUTHENTICATED]
        total += words[first + _LATENCY_SUM]
        longest = max(longest, words[first + _LATENCY_MAX])
    return ReauthenticationLatency(times, total, longest)
