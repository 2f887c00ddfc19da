"""What is shown of connections' encryption and of processors, out of shared memory."""

from __future__ import annotations

import pytest

from mpbroker.exporter.collector import Collector
from mpbroker.exporter.selector_names import SelectorNames
from mpbroker.ipc.counters.authentication_counts import AuthenticationCounts
from mpbroker.ipc.layout import (
    CONNECTION_ENCRYPTION,
    CONNECTION_OWNER,
    CONNECTION_STATE,
    PROCESSOR_COUNTERS,
    PROCESSOR_LISTENER,
    PROCESSOR_ROWS_USED,
    ConnectionState,
    connection_row,
    processor_row,
)
from mpbroker.ipc.layout import ProcessorCounter as C
from tests.support.memory import broker_memory

S = 1_000_000_000
SELECTOR = "kafka_server_socket_server_metrics_"


@pytest.fixture
def memory():
    with broker_memory() as made:
        yield made


def values(families, name):
    """By labels, of one family."""
    return {
        labels: value
        for family in families
        if family.name == name
        for _, labels, value in family.samples
    }


def test_connections_with_tls_are_shown_by_version_and_cipher_suite(memory):
    words = memory.control.words
    suites = [0x0304_1301, 0x0304_1301, 0x0303_C02F, 0]  # the last is not encrypted
    words[processor_row(0) + PROCESSOR_ROWS_USED] = len(suites)
    for connection, suite in enumerate(suites):
        row = connection_row(connection)
        words[row + CONNECTION_STATE] = ConnectionState.READING
        words[row + CONNECTION_OWNER] = 1
        words[row + CONNECTION_ENCRYPTION] = suite
    collector = Collector(memory, [], None, dict, ["SSL"])
    shown = values(collector.connections(), "mpbroker_tls_connections")
    assert shown == {
        (("cipher", "TLS_AES_128_GCM_SHA256"), ("protocol", "TLSv1.3")): 2,
        (
            ("cipher", "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"),
            ("protocol", "TLSv1.2"),
        ): 1,
    }


def test_how_long_clients_took_to_prove_themselves_again_is_a_sum_and_a_count(memory):
    collector = Collector(memory, [], None, dict, [])
    assert not list(collector._reauthentications())
    words = memory.control.words
    AuthenticationCounts(0, words).count_again(2 * S)
    AuthenticationCounts(0, words).count_again(4 * S)
    AuthenticationCounts(5, words).count_again(3 * S)
    again, longest = collector._reauthentications()
    assert [(suffix, value) for suffix, _, value in again.samples] == [
        ("_sum", 9.0),
        ("_count", 3),
    ]
    assert longest.samples == [("", (), 4.0)]


def test_rates_and_shares_are_of_the_time_between_two_looks(memory):
    words, names = memory.control.words, SelectorNames(memory.control.words, ["SSL"])
    row = processor_row(2)
    labels = (("listener", "SSL"), ("network_processor", 2))
    words[row + PROCESSOR_LISTENER] = 1
    AuthenticationCounts(2, words).count_again(3 * S)
    names.look(10 * S)
    assert values(names.families(), SELECTOR + "io_ratio") == {}
    counters = row + PROCESSOR_COUNTERS
    words[counters + C.IDLE_NS] = S
    words[counters + C.POLLS] = 50
    words[counters + C.REQUESTS] = 10
    words[counters + C.BYTES_IN] = 1000
    names.look(12 * S)
    families = names.families()
    for name, value in (
        ("io_wait_ratio", 0.5),
        ("io_ratio", 0.5),
        ("select_rate", 25.0),
        ("select_total", 50),
        ("io_wait_time_ns_avg", S / 50),
        ("io_time_ns_avg", S / 50),
        ("incoming_byte_rate", 500.0),
        ("incoming_byte_total", 1000),
        ("request_size_avg", 100.0),
        ("reauthentication_latency_avg", 3000.0),
        ("successful_reauthentication_total", 1),
        ("failed_authentication_total", 0),
    ):
        assert values(families, SELECTOR + name) == {labels: value}, name
    # Who slept longer than the time between two looks counts it all at once.
    words[counters + C.IDLE_NS] = 100 * S
    names.look(13 * S)
    assert values(names.families(), SELECTOR + "io_ratio") == {labels: 0.0}
