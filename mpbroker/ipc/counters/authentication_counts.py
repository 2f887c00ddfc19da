"""The results of clients' authentications, counted by processors.

A processor adds to its own words, and its successors continue with them; readers add up
all processors there ever were. Each AuthenticationResult has one word; two more are:

    24    re-authentication  ns, from the first step to the last, sum of all
    25    the longest        ns
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.layout import (
    AUTHENTICATION_TABLES,
    AUTHENTICATION_WORDS,
    MAX_PROCESSORS,
)


class AuthenticationResult(IntEnum):
    """The result of an authentication; metrics have its name in lower case.

    All results except the first three and SESSION_EXPIRED ended the connection before
    its first request.
    """

    HANDSHAKE = 0  # TLS is agreed upon
    AUTHENTICATED = 1
    REAUTHENTICATED = 2
    SESSION_EXPIRED = 3  # a request came after connections.max.reauth.ms
    NOT_TLS = 4  # the first bytes were no TLS
    TLS_VERSION = 5  # no version that both sides know
    TLS_CIPHER = 6  # no cipher suite that both sides know
    TLS_CERTIFICATE = 7  # a client's certificate is missing, or not accepted
    TLS_REFUSED_BY_CLIENT = 8  # an alert: mostly, it does not trust our certificate
    TLS_OTHER = 9
    NOT_SASL = 10  # a request of another API than the three, or a step out of order
    MECHANISM = 11  # not among sasl.enabled.mechanisms
    CREDENTIALS = 12  # wrong password, unknown user, token not valid
    TOO_LARGE = 13  # sasl.server.max.receive.size
    TIMEOUT = 14  # not finished in time
    GONE = 15  # the client closed the connection before the end
    UNAVAILABLE = 16  # we could not decide: no room for the principal, or no keys


_LATENCY_SUM: Final = 24
_LATENCY_MAX: Final = 25

assert len(AuthenticationResult) <= _LATENCY_SUM < _LATENCY_MAX < AUTHENTICATION_WORDS


class ReauthenticationLatency(NamedTuple):
    """The number of re-authentications; their total time and the longest one, in ns."""

    times: int
    sum_ns: int
    max_ns: int


class AuthenticationCounts:
    """One processor's counts of the results of authentications."""

    def __init__(self, processor: int, words: memoryview) -> None:
        self._words: Final = words
        self._first: Final = AUTHENTICATION_TABLES + processor * AUTHENTICATION_WORDS

    def count(self, result: AuthenticationResult) -> None:
        self._words[self._first + result] += 1

    def count_again(self, took_ns: int) -> None:
        """Count a re-authentication, and the time that it took in ns."""
        words, first = self._words, self._first
        words[first + AuthenticationResult.REAUTHENTICATED] += 1
        words[first + _LATENCY_SUM] += took_ns
        words[first + _LATENCY_MAX] = max(took_ns, words[first + _LATENCY_MAX])


def read_authentications(
    words: memoryview, processors: Iterable[int] = range(MAX_PROCESSORS)
) -> dict[AuthenticationResult, int]:
    """Return how often each result occurred in some processors together, even if 0."""
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
    """Return number and times of the re-authentications of some processors together."""
    times = total = longest = 0
    for each in processors:
        first = AUTHENTICATION_TABLES + each * AUTHENTICATION_WORDS
        times += words[first + AuthenticationResult.REAUTHENTICATED]
        total += words[first + _LATENCY_SUM]
        longest = max(longest, words[first + _LATENCY_MAX])
    return ReauthenticationLatency(times, total, longest)
