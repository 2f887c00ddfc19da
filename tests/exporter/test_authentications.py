"""How attempts to authenticate ended, as metrics."""

from __future__ import annotations

from mpbroker.exporter.collector import Collector
from mpbroker.ipc.counters.authentication_counts import (
    AuthenticationCounts,
    AuthenticationResult,
    read_authentications,
)
from tests.support.memory import broker_memory


def shown(memory) -> dict[str, float]:
    collector = Collector(memory, [], None, dict, [])  # type: ignore[arg-type]
    return {
        str(dict(labels)["result"]): value
        for family in collector._authentications()
        for _, labels, value in family.samples
    }


def test_nothing_is_shown_where_nobody_authenticates_and_all_reasons_where_one_does():
    with broker_memory() as memory:
        assert shown(memory) == {}
        words = memory.control.words
        AuthenticationCounts(3, words).count(AuthenticationResult.CREDENTIALS)
        AuthenticationCounts(15, words).count(AuthenticationResult.CREDENTIALS)
        # A successor goes on.
        AuthenticationCounts(3, words).count(AuthenticationResult.TLS_VERSION)
        found = shown(memory)
        assert found["credentials"] == 2 and found["tls_version"] == 1
        assert len(found) == len(AuthenticationResult)
        one = read_authentications(words, [3])
        assert one[AuthenticationResult.CREDENTIALS] == 1
