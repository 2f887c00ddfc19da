"""Who may connect, who waits, who is sent away. After Kafka's ConnectionQuotasTest.

Three listeners share the quotas: EXTERNAL, ADMIN, and REPLICATION, which brokers use
among themselves and which is protected from the broker's limits, not from its own.
"""

from __future__ import annotations

import itertools

import pytest

from mpbroker.ipc.layout import (
    CONNECTION_ACTIVE,
    CONNECTION_LISTENER,
    CONNECTION_PEER_ADDRESS,
    CONNECTION_PEER_PORT,
    CONNECTION_STATE,
    CONNECTIONS_PER_PROCESSOR,
    PROCESSOR_COUNTERS,
    PROCESSOR_REGISTERED,
    PROCESSOR_ROWS_USED,
    ConnectionState,
    ProcessorCounter,
    connection_row,
    processor_row,
)
from mpbroker.ipc.limits_page import (
    AddressLimits,
    BrokerLimits,
    Limits,
    LimitsPage,
    ListenerLimits,
)
from mpbroker.network.connection_ledger import ARRIVALS
from mpbroker.network.connection_quotas import (
    ConnectionQuotas,
    Verdict,
    excess_connections,
)
from tests.support.children import fork
from tests.support.memory import broker_memory

EXTERNAL, ADMIN, REPLICATION = range(3)
LISTENERS = (EXTERNAL, ADMIN, REPLICATION)
SECOND = 1_000_000_000
HERE, THERE = (0, 0x7F00_0001_FFFF_0000), (0, 0x0101_A8C0_FFFF_0000)


class Hall:
    """The acceptors of three listeners, each with one processor, and a clock."""

    def __init__(self, memory) -> None:
        self.memory = memory
        self.words = memory.control.words
        self.page = LimitsPage(memory.limits)
        self.quotas = [
            ConnectionQuotas(listener, memory.limits, memory.control)
            for listener in LISTENERS
        ]
        self.now = 1000 * SECOND
        self._ports = itertools.count(1)
        self._numbers = [0, 0, 0]
        self.refusals: list[Verdict] = []

    def limit(self, listeners=(), addresses=None, **broker: int) -> None:
        own = [ListenerLimits(**dict(listeners).get(each, {})) for each in LISTENERS]
        limits = BrokerLimits(protected_listener=REPLICATION, **broker)
        self.page.publish(Limits(limits, own, addresses or {}))

    def accept(self, listener: int, address=HERE, *, registered: bool = True):
        """One more client; its row, None if it must wait or was sent away."""
        quotas = self.quotas[listener]
        if quotas.reserve(self.now):
            return None
        port = next(self._ports)
        judgement = quotas.admit(address, port, self.now)
        if judgement.verdict is not Verdict.ADMITTED:
            self.refusals.append(judgement.verdict)
            return None
        self._numbers[listener] += 1
        quotas.handed(listener, self._numbers[listener])
        return self.register(listener, address, port) if registered else -1

    def register(self, listener: int, address, port: int) -> int:
        """Its processor gives it a row."""
        row = processor_row(listener)
        index = self.words[row + PROCESSOR_ROWS_USED]
        connection = listener * CONNECTIONS_PER_PROCESSOR + index
        word = connection_row(connection)
        self.words[word + CONNECTION_LISTENER] = listener
        self.words[word + CONNECTION_PEER_ADDRESS] = address[0]
        self.words[word + CONNECTION_PEER_ADDRESS + 1] = address[1]
        self.words[word + CONNECTION_PEER_PORT] = port
        self.words[word + CONNECTION_ACTIVE] = self.now
        self.words[word + CONNECTION_STATE] = ConnectionState.READING
        self.words[row + PROCESSOR_ROWS_USED] = index + 1
        self.words[row + PROCESSOR_REGISTERED] += 1
        self.words[row + PROCESSOR_COUNTERS + ProcessorCounter.CONNECTIONS] += 1
        return connection

    def close(self, connection: int) -> None:
        self.words[connection_row(connection) + CONNECTION_STATE] = ConnectionState.FREE
        row = processor_row(connection // CONNECTIONS_PER_PROCESSOR)
        self.words[row + PROCESSOR_COUNTERS + ProcessorCounter.CONNECTIONS] -= 1

    def fill(self, listener: int, count: int, address=HERE) -> list[int]:
        taken = [self.accept(listener, address) for _ in range(count)]
        assert None not in taken
        return taken

    def offer(self, rate: int, seconds: int, *listeners: int, address=HERE):
        """Clients that connect at an even rate; how many came in, by listener."""
        accepted = dict.fromkeys(listeners, 0)
        waiting = dict.fromkeys(listeners, 0)
        for _ in range(rate * seconds):
            self.now += SECOND // rate
            for listener in listeners:
                waiting[listener] += 1
                while waiting[listener]:
                    before = len(self.refusals)
                    row = self.accept(listener, address)
                    if row is None and len(self.refusals) == before:
                        break  # the acceptor waits
                    waiting[listener] -= 1
                    accepted[listener] += row is not None
        return accepted


@pytest.fixture
def hall():
    with broker_memory() as memory:
        yield Hall(memory)


def test_nothing_is_limited_until_somebody_asks_for_it(hall):
    for listener in LISTENERS:
        hall.fill(listener, 1000)
    assert not hall.refusals


def test_an_address_has_as_many_connections_as_it_may_and_no_more(hall):
    hall.limit(max_per_address=17)
    taken = hall.fill(EXTERNAL, 17)
    assert hall.accept(EXTERNAL) is None and hall.accept(ADMIN) is None
    assert hall.refusals == [Verdict.TOO_MANY] * 2
    hall.fill(EXTERNAL, 17, address=THERE)
    hall.close(taken[3])
    hall.close(taken[4])
    hall.fill(ADMIN, 2)
    assert hall.accept(EXTERNAL) is None


def test_an_override_wins_over_the_limit_of_all_in_both_directions(hall):
    hall.limit(
        max_per_address=5, addresses={HERE: AddressLimits(6), THERE: AddressLimits(2)}
    )
    hall.fill(EXTERNAL, 6)
    hall.fill(EXTERNAL, 2, address=THERE)
    assert hall.accept(EXTERNAL) is None
    assert hall.accept(EXTERNAL, THERE) is None


def test_a_limit_of_none_keeps_out_all_but_the_exceptions(hall):
    hall.limit(max_per_address=0, addresses={HERE: AddressLimits(5)})
    hall.fill(EXTERNAL, 5)
    assert hall.accept(EXTERNAL) is None
    assert hall.accept(EXTERNAL, THERE) is None


def test_the_brokers_limit_holds_over_all_listeners_but_the_protected_one(hall):
    hall.limit(max_connections=80)
    taken = hall.fill(EXTERNAL, 80)
    assert hall.accept(EXTERNAL) is None and hall.accept(ADMIN) is None
    assert not hall.refusals  # they wait
    hall.close(taken.pop())
    hall.fill(EXTERNAL, 1)
    hall.fill(REPLICATION, 2)
    assert hall.accept(ADMIN) is None
    for _ in range(2):
        hall.close(taken.pop())
        assert hall.accept(ADMIN) is None  # still two above
    hall.close(taken.pop())
    assert hall.accept(ADMIN) is not None


def test_a_listeners_limit_is_its_own_and_protects_from_nothing(hall):
    hall.limit({each: {"max_connections": 20} for each in LISTENERS})
    for listener in LISTENERS:
        taken = hall.fill(listener, 20)
        assert hall.accept(listener) is None
        hall.close(taken[0])
        hall.fill(listener, 1)
        assert hall.accept(listener) is None


def test_those_on_their_way_to_a_row_count_and_each_once(hall):
    hall.limit(max_connections=3)
    for _ in range(2):
        assert hall.accept(EXTERNAL, registered=False) == -1
    hall.fill(ADMIN, 1)
    assert hall.accept(ADMIN) is None
    # The two get rows: there are no more than before.
    hall.register(EXTERNAL, HERE, 1)
    hall.register(EXTERNAL, HERE, 2)
    assert hall.accept(ADMIN) is None
    hall.close(0)
    hall.fill(ADMIN, 1)


def test_what_an_acceptor_left_on_the_way_when_it_died_is_forgotten(hall):
    hall.limit(max_connections=1)

    def reserve_and_die():
        assert hall.quotas[EXTERNAL].reserve(hall.now) == 0

    assert fork(reserve_and_die) == 0
    assert hall.accept(ADMIN) is None  # it may still come
    hall.now += 11 * SECOND
    assert hall.accept(ADMIN) is not None


def test_a_client_that_left_before_it_had_a_row_is_forgotten(hall):
    hall.limit(max_connections=1)
    assert hall.accept(EXTERNAL, registered=False) == -1
    hall.words[processor_row(EXTERNAL) + PROCESSOR_REGISTERED] += 1
    assert hall.accept(ADMIN) is None
    hall.now += SECOND
    assert hall.accept(ADMIN) is not None


def test_a_lock_whose_owner_died_is_taken_over(hall):
    hall.limit(max_connections=5)

    def die_holding_it():
        hall.quotas[EXTERNAL]._ledger.mutex.acquire()

    assert fork(die_holding_it) == 0
    hall.fill(EXTERNAL, 5)


def test_more_on_their_way_than_can_be_noted_wait(hall):
    hall.limit(max_connections=2 * ARRIVALS)
    for _ in range(ARRIVALS):
        assert hall.accept(EXTERNAL, registered=False) == -1
    assert hall.accept(EXTERNAL) is None
    hall.words[processor_row(EXTERNAL) + PROCESSOR_REGISTERED] = ARRIVALS
    hall.now += SECOND
    assert hall.accept(EXTERNAL) is None  # but it has tidied up
    assert hall.accept(EXTERNAL) is not None


# -- rates -----------------------------------------------------------------------------


def test_below_the_brokers_rate_nobody_waits(hall):
    hall.limit(creation_rate=125)
    assert hall.offer(40, 5, *LISTENERS) == dict.fromkeys(LISTENERS, 200)


def test_above_the_brokers_rate_all_but_the_protected_listener_are_slowed_down(hall):
    hall.limit(creation_rate=90, rate_samples=2)
    accepted = hall.offer(40, 10, *LISTENERS)
    assert accepted[REPLICATION] == 400
    # Its own count, so that there are 50 a second left for the others.
    assert 400 <= accepted[EXTERNAL] + accepted[ADMIN] <= 620
    assert not hall.refusals


@pytest.mark.parametrize(("bound", "least", "most"), [(50, 400, 400), (30, 230, 370)])
def test_a_listeners_rate_is_its_own_for_the_protected_one_too(
    hall, bound, least, most
):
    hall.limit({each: {"creation_rate": bound} for each in LISTENERS}, rate_samples=2)
    accepted = hall.offer(40, 10, *LISTENERS)
    assert all(least <= count <= most for count in accepted.values()), accepted


def test_an_addresss_rate_refuses_and_holds_nobody_else_up(hall):
    hall.limit(addresses={HERE: AddressLimits(creation_rate=20)}, rate_samples=2)
    accepted = hall.offer(40, 10, EXTERNAL)
    assert 150 <= accepted[EXTERNAL] <= 250
    assert set(hall.refusals) == {Verdict.THROTTLED}
    assert accepted[EXTERNAL] + len(hall.refusals) == 400
    assert hall.offer(40, 1, EXTERNAL, address=THERE) == {EXTERNAL: 40}


def test_an_addresss_rate_is_one_over_all_listeners(hall):
    hall.limit(address_rate=20, rate_samples=2)
    accepted = hall.offer(20, 10, EXTERNAL, ADMIN)
    assert 150 <= sum(accepted.values()) <= 250


def test_below_an_addresss_rate_none_is_throttled(hall):
    hall.limit(address_rate=30)
    assert hall.offer(25, 10, EXTERNAL) == {EXTERNAL: 250}


def test_one_that_its_address_refuses_does_not_count_for_the_listeners_rate(hall):
    hall.limit(
        {EXTERNAL: {"creation_rate": 30}},
        addresses={HERE: AddressLimits(creation_rate=0)},
        rate_samples=2,
    )
    assert hall.offer(100, 3, EXTERNAL) == {EXTERNAL: 0}
    assert len(hall.refusals) == 300  # none waited for the listener's rate
    assert hall.offer(20, 1, EXTERNAL, address=THERE) == {EXTERNAL: 20}


def test_a_look_that_ends_in_the_next_window_does_not_count_for_the_rate(hall):
    hall.limit(creation_rate=1, rate_samples=2)
    hall.now += SECOND - 1  # one ns before the end of a window
    assert hall.quotas[EXTERNAL].reserve(hall.now) == 0
    hall.now += 1
    hall.quotas[EXTERNAL].withdraw()
    assert hall.accept(EXTERNAL) is not None


def test_one_refused_in_the_next_window_does_not_count_for_the_rate(hall):
    full = {HERE: AddressLimits(max_connections=0)}
    hall.limit(addresses=full, creation_rate=1, rate_samples=2)
    hall.now += SECOND - 1
    assert hall.quotas[EXTERNAL].reserve(hall.now) == 0
    hall.now += 1
    judged = hall.quotas[EXTERNAL].admit(HERE, 1, hall.now)
    assert judged.verdict is Verdict.TOO_MANY
    hall.limit(creation_rate=1, rate_samples=2)
    assert hall.accept(EXTERNAL) is not None


def test_a_changed_rate_counts_from_the_next_connection_on(hall):
    hall.limit(creation_rate=20, rate_samples=2)
    slow = hall.offer(40, 5, EXTERNAL)
    hall.limit(creation_rate=10_000, rate_samples=2)
    fast = hall.offer(40, 5, EXTERNAL)
    assert slow[EXTERNAL] <= 125 and fast[EXTERNAL] >= 200
    hall.limit(address_rate=10, rate_samples=2)
    assert hall.offer(40, 5, EXTERNAL)[EXTERNAL] <= 75


def test_a_throttled_connection_is_held_for_a_second_at_most(hall):
    hall.limit(address_rate=5, rate_samples=2)
    hall.fill(EXTERNAL, 5)
    quotas = hall.quotas[EXTERNAL]
    assert quotas.reserve(hall.now) == 0
    judgement = quotas.admit(HERE, 99, hall.now)
    assert judgement.verdict is Verdict.THROTTLED
    assert 0 < judgement.until_ns - hall.now <= SECOND


def test_the_rates_of_more_addresses_than_there_is_room_for_cost_no_one_else(hall):
    hall.limit(address_rate=5, rate_samples=2)
    for number in range(3000):
        hall.quotas[EXTERNAL].reserve(hall.now)
        hall.quotas[EXTERNAL].admit((1, number), 1, hall.now)
        hall.quotas[EXTERNAL].withdraw()
        hall.now += 1000
    hall.fill(EXTERNAL, 5)
    assert hall.accept(EXTERNAL) is None


def test_count_and_rate_together_the_rate_first(hall):
    hall.limit(max_connections=60, creation_rate=20, rate_samples=2)
    first = hall.offer(100, 1, EXTERNAL)[EXTERNAL]
    assert first <= 40
    hall.offer(100, 5, EXTERNAL)
    assert hall.offer(10, 1, EXTERNAL) == {EXTERNAL: 0}  # full


# -- who must go -----------------------------------------------------------------------


def test_above_the_limit_those_that_were_silent_longest_go(hall):
    hall.limit(max_connections=10)
    taken = []
    for _ in range(10):
        hall.now += SECOND
        taken += hall.fill(EXTERNAL, 1)
    hall.fill(REPLICATION, 3)
    busy = connection_row(taken[1]) + CONNECTION_STATE
    hall.words[busy] = ConnectionState.IN_FLIGHT
    limits = hall.quotas[EXTERNAL].limits
    assert excess_connections(hall.words, limits) == [taken[0], *taken[2:4]]
    hall.close(taken[0])
    assert excess_connections(hall.words, limits) == taken[2:4]


def test_nobody_goes_from_the_protected_listener_or_below_the_limit(hall):
    hall.limit(max_connections=2)
    hall.fill(REPLICATION, 5)
    limits = hall.quotas[EXTERNAL].limits
    assert excess_connections(hall.words, limits) == []
    hall.limit(max_connections=5)
    hall.fill(ADMIN, 0)
    assert excess_connections(hall.words, hall.quotas[ADMIN].limits) == []


# -- the page --------------------------------------------------------------------------


def test_limits_arrive_as_they_were_published_and_are_the_same_until_they_change(hall):
    limits = Limits(
        BrokerLimits(1, 2, 3, 4, 5, 6, 7, 8),
        tuple(ListenerLimits(n, n + 1, n + 2, n + 3) for n in range(16)),
        {(1, number): AddressLimits(number, -1) for number in range(1024)},
    )
    reader = LimitsPage(hall.memory.limits)
    hall.page.publish(limits)
    assert reader.read() == limits
    assert reader.read() is reader.read()
    hall.page.publish(Limits())
    assert reader.read() == Limits()
