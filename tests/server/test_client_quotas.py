"""The quota that applies to a client, its charges and its throttle times.

Kafka's ClientQuotaManagerTest, ClientRequestQuotaManagerTest and
ControllerMutationQuotaManagerTest, on our table; the time is the test's.
"""

from __future__ import annotations

import pytest

from mpbroker.ipc.layout import (
    CONNECTION_MUTED_UNTIL,
    CONNECTION_PRINCIPAL,
    CONNECTION_SLOT,
    CONNECTION_STATE,
    CONTROL_WORDS,
    PROCESSOR_UNIT_COST,
    SLOT_DEQUEUED,
    SLOT_PARKED,
    SLOT_REQUEST_LENGTH,
    ConnectionState,
    connection_row,
    processor_row,
    slot_row,
)
from mpbroker.ipc.segment import Segment
from mpbroker.ipc.tables import quota_table
from mpbroker.ipc.tables.quota_table import PROBES, QuotaKind, QuotaTable
from mpbroker.metadata.quota_records import ClientQuotasImage, client_quota_record
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.headers import RequestHeader
from mpbroker.protocol.messages.heartbeat import HeartbeatResponse
from mpbroker.protocol.messages.metadata import MetadataResponse
from mpbroker.protocol.messages.produce import ProduceResponse
from mpbroker.server.api_messages import with_throttle_time
from mpbroker.server.quotas.client_quotas import ClientQuotas
from mpbroker.server.request import CLOSE, FORWARDED, NO_RESPONSE, PARKED, Request

S = 1_000_000_000
MS = 1_000_000
PRODUCE, FETCH, REQUEST, MUTATION = QuotaKind
USERS = ["ANONYMOUS", *(f"user{letter}" for letter in "ABCDEFG")]
SAMPLES = 11


@pytest.fixture(scope="module")
def control():
    return Segment.create("test-control", CONTROL_WORDS * 8)


class Registry:
    def __init__(self):
        self.client_quotas = ClientQuotasImage()


class Clients:
    """Quotas, a clock, and requests of any user and client."""

    def __init__(self, control):
        self.words = control.words
        self.registry = Registry()
        self.now = 1_000 * S
        self.table = QuotaTable(QuotaTable.create_segment(), SAMPLES, S)
        self.quotas = ClientQuotas(
            self.table,
            self.registry,
            self.words,
            lambda number: f"User:{USERS[number]}",
            mutation_burst_s=SAMPLES,
            now_ns=lambda: self.now,
        )

    def set(self, bound, user="-", client="-", key="producer_byte_rate"):
        """Set a quota; None as a name is the default's, "-" is none."""
        names = {"user": user, "client-id": client}
        entity = tuple((k, names[k]) for k in sorted(names) if names[k] != "-")
        self.registry.client_quotas.replay(client_quota_record(entity, key, bound))

    def request(
        self, client="c", user="ANONYMOUS", *, key=ApiKey.METADATA, version=9, size=100
    ):
        connection = slot = USERS.index(user)
        row = connection_row(connection)
        self.words[row + CONNECTION_PRINCIPAL] = USERS.index(user)
        self.words[row + CONNECTION_MUTED_UNTIL] = 0
        self.words[row + CONNECTION_SLOT] = slot + 1
        self.words[slot_row(slot) + SLOT_REQUEST_LENGTH] = size
        self.words[slot_row(slot) + SLOT_DEQUEUED] = self.now
        self.words[slot_row(slot) + SLOT_PARKED] = 0
        header = RequestHeader(key, version, 5, client, 0)
        return Request(
            slot, connection, 0, header, memoryview(b""), flexible_response=True
        )

    def charge(self, amount, client="c", user="ANONYMOUS", kind=PRODUCE):
        return self.quotas.charge(kind, self.request(client, user), amount)

    def muted_ms(self, request):
        until = self.words[connection_row(request.connection) + CONNECTION_MUTED_UNTIL]
        return (until - self.now) / MS if until else 0


@pytest.fixture
def clients(control):
    return Clients(control)


def test_a_new_connection_in_a_reused_row_is_not_muted(clients):
    clients.set(1.0, client="c")
    request = clients.request(key=ApiKey.PRODUCE, size=1_000_000)
    row = connection_row(request.connection)
    clients.words[row + CONNECTION_SLOT] = 0  # as its next client makes it
    clients.quotas.settle(request, b"answer")
    assert clients.muted_ms(request) == 0


def taken_by(clients, request, user=None):
    """Disconnect the request's client; its row is free, or of another client."""
    row = connection_row(request.connection)
    clients.words[row + CONNECTION_SLOT] = -(request.slot + 1)
    clients.words[row + CONNECTION_STATE] = 0
    if user is not None:
        clients.words[row + CONNECTION_SLOT] = 0
        clients.words[row + CONNECTION_PRINCIPAL] = USERS.index(user)
        clients.words[row + CONNECTION_STATE] = ConnectionState.READING


def test_the_next_client_of_a_row_does_not_pay_for_the_one_before(clients):
    clients.set(100.0, "userA", None)
    clients.set(100.0, "userB", None)
    request = clients.request("c", "userA", key=ApiKey.PRODUCE, size=1_000_000)
    taken_by(clients, request, "userB")
    clients.quotas.settle(request, b"answer")
    assert clients.charge(0, user="userB") == 0


def test_a_later_client_of_a_row_does_not_pay_after_it_disconnected(clients):
    clients.set(100.0, "userB", None)
    request = clients.request("c", "userA", key=ApiKey.PRODUCE, size=1_000_000)
    taken_by(clients, request, "userB")
    clients.words[connection_row(request.connection) + CONNECTION_STATE] = 0
    clients.quotas.settle(request, b"answer")
    assert clients.charge(0, user="userB") == 0


def test_a_client_that_disconnects_pays_while_its_row_is_not_reused(clients):
    clients.set(100.0, "userA", None)
    request = clients.request("c", "userA", key=ApiKey.PRODUCE, size=1_000_000)
    taken_by(clients, request)
    clients.quotas.settle(request, b"answer")
    assert clients.charge(0, user="userA") > 0


def test_a_bucket_that_has_become_another_clients_is_left_alone(clients):
    clients.set(1.0, "userA", key="controller_mutation_rate")
    request = clients.request("c", "userA", key=ApiKey.CREATE_TOPICS, version=6)
    permit = clients.quotas.permit(request, 6)
    permit(1)
    row = clients.table.find(MUTATION, "userA", "", clients.now)
    clients.now += 1_000 * S
    key = quota_table._key((int(MUTATION), "userB", ""))
    other = clients.table._give(row.row, key, (int(MUTATION), "userB", ""), clients.now)
    clients.quotas.permit(request, 6)(SAMPLES * 5)  # far more than its burst
    assert other.mutate(1, 1.0, SAMPLES, clients.now, strict=True) == (True, 0)


# -- whose quota ----------------------------------------------------------------------


def test_the_first_of_eight_levels_counts(clients):
    levels = [
        ("userA", "c"),
        ("userA", None),
        ("userA", "-"),
        (None, "c"),
        (None, None),
        (None, "-"),
        ("-", "c"),
        ("-", None),
    ]
    for bound, (user, client) in enumerate(levels, 1):
        clients.set(100.0 * bound, user, client, "consumer_byte_rate")
    for bound, (user, client) in enumerate(levels, 1):
        window = clients.quotas.fetch_window(clients.request("c", "userA"))
        assert window == 100 * bound * (SAMPLES - 1)
        clients.set(None, user, client, "consumer_byte_rate")
    assert clients.quotas.fetch_window(clients.request("c", "userA")) is None


def test_kafkas_precedence(clients):
    def check(user, client, bound, value, throttled):
        clients.set(bound, "-", "for the window alone", "consumer_byte_rate")
        throttle_ms = clients.charge(value * SAMPLES, client, user)
        assert (throttle_ms > 0) == throttled, (user, client, bound, throttle_ms)

    put = clients.set
    put(1000, None)
    put(2000, "-", None)
    put(3000, None, None)
    put(4000, "userA")
    put(5000, "userA", "client1")
    put(6000, "userB")
    put(7000, "userB", "client1")
    put(8000, "userB", None)
    put(10000, "userC")
    put(9000, "-", "client1")

    check("userA", "client1", 5000, 4500, False)  # before that of the user
    check("userA", "client2", 4000, 4500, True)  # before those of clients
    check("userA", "client3", 4000, 0, True)  # all clients of the user share it
    check("userA", "client1", 5000, 0, False)  # and this one does not
    check("userB", "client1", 7000, 8000, True)
    check("userB", "client2", 8000, 7000, False)
    check("userB", "client3", 8000, 7000, False)  # by default each has its own
    check("userD", "client1", 3000, 3500, True)
    check("userD", "client2", 3000, 2500, False)
    check("userE", "client1", 3000, 2500, False)

    put(None, None, None)
    check("userD", "client1", 1000, 0, False)  # counted together with others now
    check("userE", "client4", 1000, 1500, True)
    check("userF", "client4", 1000, 800, False)
    check("userF", "client5", 1000, 800, True)

    put(None, None)
    check("userF", "client4", 2000, 0, False)
    check("userF", "client5", 2000, 0, False)
    check("userF", "client5", 2000, 2500, True)
    check("userG", "client5", 2000, 0, True)  # a client's is shared by users

    put(8000, "userA")
    put(10000, "userA", "client1")
    check("userA", "client2", 8000, 0, False)
    check("userA", "client2", 8000, 4500, True)
    check("userA", "client1", 10000, 0, False)
    check("userA", "client1", 10000, 6000, True)
    put(None, "userA", "client1")
    check("userA", "client6", 8000, 0, True)
    put(11000, "userA", "client6")
    check("userA", "client6", 11000, 8500, False)
    put(12000, "userA", None)
    put(None, "userA", "client6")
    check("userA", "client6", 12000, 4000, True)


def test_kinds_are_looked_for_apart(clients):
    clients.set(10, "userA", "c", "producer_byte_rate")
    clients.set(20, None, "-", "consumer_byte_rate")
    assert clients.quotas.fetch_window(clients.request("c", "userA")) == 200
    assert clients.charge(1000, "c", "userA") > 0
    assert clients.charge(1000, "c", "userB") == 0


@pytest.mark.parametrize("client", [None, ""])
def test_a_client_without_a_client_id_has_the_defaults(clients, client):
    clients.set(10, "-", None)
    assert clients.charge(200, client) == 10_000
    clients.set(None, "-", None)
    clients.set(40, "userA")
    assert clients.charge(200, client, "userA") == 0


def test_a_changed_quota_counts_at_once_and_a_removed_one_no_more(clients):
    clients.set(2000)
    assert clients.charge(2500 * SAMPLES) == 0  # nobody is named
    clients.set(2000, "-", "c")
    assert clients.charge(2500 * SAMPLES) > 0
    clients.set(3000, "-", "c")
    assert clients.charge(0) == 0
    clients.set(500, "-", "c")
    assert clients.charge(0) > 0
    clients.set(None, "-", "c")
    assert clients.charge(0) == 0
    assert not clients.quotas.is_set(FETCH)


def test_a_client_that_finds_no_row_is_not_held_and_the_log_says_so(
    clients, monkeypatch, caplog
):
    monkeypatch.setattr(quota_table, "_key", lambda place: (7, hash(place)))
    clients.set(10, "-", None)
    for number in range(PROBES):
        assert clients.charge(1000, f"client {number}") > 0
    assert clients.charge(1000, "one more") == 0
    assert clients.charge(1000, "and another") == 0
    assert caplog.text.count("producer_byte_rate is not enforced") == 1
    clients.now += 20 * S
    assert clients.charge(1000, "one that comes later") > 0


def test_a_row_that_another_client_has_got_is_looked_for_again(clients, monkeypatch):
    monkeypatch.setattr(quota_table, "PROBES", 1)
    clients.set(10, "-", None)
    monkeypatch.setattr(quota_table, "_key", lambda place: (7, hash(place)))
    assert clients.charge(1000, "first") > 0
    clients.now += 20 * S
    assert clients.charge(1000, "second") > 0
    clients.now += 20 * S
    assert clients.charge(0, "first") == 0
    assert clients.charge(1000, "first") > 0


# -- what requests cost ---------------------------------------------------------------


def test_a_produce_is_charged_its_bytes_and_muted_before_it_is_answered(clients):
    clients.set(10, "-", None)
    request = clients.request(key=ApiKey.PRODUCE, size=200)
    body = ProduceResponse(responses=[]).encode(9)
    answer = clients.quotas.settle(request, body)
    assert ProduceResponse.decode(9, answer).throttle_time_ms == 10_000
    assert clients.muted_ms(request) == 10_000


def test_a_produce_with_acks_0_is_muted_too(clients):
    clients.set(10, "-", None)
    clients.set(0.0001, "-", None, "request_percentage")
    request = clients.request(key=ApiKey.PRODUCE, size=200)
    clients.now += S
    assert clients.quotas.settle(request, NO_RESPONSE) is NO_RESPONSE
    assert clients.muted_ms(request) == 10_000
    # Its time is not charged, since nobody could be told: only its bytes.
    other = clients.request("c")
    assert clients.quotas.charge(REQUEST, other, 0) == 0


def test_a_parked_produce_is_charged_when_it_is_parked(clients):
    clients.set(10, "-", None)
    request = clients.request(key=ApiKey.PRODUCE, size=200)
    assert clients.quotas.settle(request, PARKED) is PARKED
    assert request.throttle_ms == 10_000


@pytest.mark.parametrize("answer", [CLOSE, FORWARDED])
def test_a_request_that_is_not_executed_is_not_charged(clients, answer):
    clients.set(10, "-", None)
    request = clients.request(key=ApiKey.PRODUCE, size=200)
    assert clients.quotas.settle(request, answer) is answer
    assert clients.charge(0) == 0


def test_time_is_charged_in_percent_of_a_process_and_throttled_for_a_window_at_most(
    clients,
):
    # ClientRequestQuotaManagerTest: 1 % is 10 ms a second, and 100 ms in ten seconds.
    clients.set(1, "-", None, "request_percentage")
    body = MetadataResponse(topics=[]).encode(9)

    def execute(took_ms):
        request = clients.request()
        clients.now += took_ms * MS
        answer = clients.quotas.settle(request, body)
        assert clients.muted_ms(request) == request.throttle_ms
        return MetadataResponse.decode(9, answer).throttle_time_ms

    assert execute(5) == 0
    clients.now += S
    assert execute(90) == 0
    assert execute(16) == 994  # 111 ms in 10.106 s, in which 101.06 may be
    assert execute(3000) == 1000


def test_the_longest_throttle_counts(clients):
    clients.set(10, "-", None)
    clients.set(0.001, "-", None, "request_percentage")
    request = clients.request(key=ApiKey.PRODUCE, size=101)
    clients.now += 10 * MS
    body = ProduceResponse(responses=[]).encode(9)
    clients.quotas.settle(request, body)
    assert request.throttle_ms == 1000  # of 100 for the bytes


def test_a_request_is_charged_for_its_processors_time_too(clients):
    clients.set(100, "-", None, "request_percentage")
    unit = processor_row(0) + PROCESSOR_UNIT_COST
    clients.words[unit] = MS
    request = clients.request(size=65536)
    try:
        clients.now += 5 * MS
        body = MetadataResponse(brokers=[], topics=[]).encode(9)
        clients.quotas.settle(request, body)
        clients.quotas.charge_time(request, 3 * MS)
        clients.quotas.charge_fetch(request, 3 * 65536)
    finally:
        clients.words[unit] = 0
    [quota] = quota_table.read_quotas(clients.table._segment, SAMPLES, S, 0, 1 << 62)
    answered = len(body) * MS >> 16
    # Three times the request, an answer, and a fetch's.
    assert quota.charged == pytest.approx(
        (5 + 2 + 3 + 2 + 5 + 5) * MS + answered, abs=3
    )


def test_requests_between_brokers_are_exempt(clients):
    clients.set(0.001, "-", None, "request_percentage")
    request = clients.request(key=ApiKey.WRITE_TXN_MARKERS)
    clients.now += S
    clients.quotas.settle(request, b"")
    assert request.throttle_ms == 0


def test_the_time_in_which_a_request_is_parked_is_not_charged(clients):
    clients.set(1, "-", None, "request_percentage")
    request = clients.request(key=ApiKey.FETCH)
    row = slot_row(request.slot)
    clients.words[row + SLOT_PARKED] = clients.now + MS
    clients.now += 500 * S
    assert clients.quotas.charge_fetch(request, 0)
    clients.now += 11 * S
    clients.words[row + SLOT_PARKED] = 0
    assert not clients.quotas.charge_fetch(request, 0)


def test_a_fetch_that_gets_nothing_is_not_charged(clients):
    clients.set(100, "-", None, "consumer_byte_rate")
    request = clients.request(key=ApiKey.FETCH)
    assert clients.quotas.fetch_window(request) == 1000
    assert clients.quotas.charge_fetch(request, 900)
    clients.quotas.charge_rest_of_fetch(request, [b"x" * 1000], 900)
    assert not clients.quotas.charge_fetch(request, 500)
    assert request.throttle_ms == 5000
    assert clients.muted_ms(request) == 5000
    clients.now += 5 * S
    assert clients.quotas.charge_fetch(clients.request(key=ApiKey.FETCH), 0)
    clients.now += 6 * S
    assert clients.quotas.charge_fetch(clients.request(key=ApiKey.FETCH), 900)


def test_without_a_quota_nothing_is_counted(clients):
    request = clients.request(key=ApiKey.FETCH)
    assert clients.quotas.charge_fetch(request, 10**9)
    clients.quotas.charge_rest_of_fetch(request, [b"x"], 0)
    assert clients.quotas.settle(clients.request(), b"body") == b"body"
    assert not list(quota_table.read_quotas(clients.table._segment, SAMPLES, S, 0, S))


# -- changes of topics ----------------------------------------------------------------


def test_a_strict_quota_refuses_and_mutes_and_an_older_client_is_only_muted(clients):
    clients.set(10, "-", None, "controller_mutation_rate")
    new = clients.request(key=ApiKey.CREATE_TOPICS, version=6)
    permit = clients.quotas.permit(new, 6)
    permit(110)
    permit(10)  # there was no debt
    assert new.throttle_ms == 0
    with pytest.raises(ApiError) as caught:
        permit(1)
    assert caught.value.error_code == ErrorCode.THROTTLING_QUOTA_EXCEEDED
    assert new.throttle_ms == clients.muted_ms(new) == 1000
    old = clients.request(key=ApiKey.CREATE_TOPICS, version=5)
    clients.quotas.permit(old, 6)(10)
    assert old.throttle_ms == 2000
    clients.now += 2 * S
    clients.quotas.permit(new, 6)(1)


def test_without_a_mutation_quota_all_changes_are_allowed(clients):
    assert clients.quotas.permit(clients.request(), 6) is None


# -- answers --------------------------------------------------------------------------


def test_versions_without_the_field_are_answered_as_they_were():
    body = HeartbeatResponse(error_code=0).encode(0)
    assert with_throttle_time(ApiKey.HEARTBEAT, 0, body, 5) == body
    body = HeartbeatResponse(error_code=27).encode(4)
    answer = HeartbeatResponse.decode(
        4, with_throttle_time(ApiKey.HEARTBEAT, 4, body, 5)
    )
    assert (answer.throttle_time_ms, answer.error_code) == (5, 27)
    assert with_throttle_time(ApiKey.HEARTBEAT, 4, b"torn", 5) == b"torn"
