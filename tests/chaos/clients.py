"""Many clients in one loop, which know what every request of theirs must answer.

Each has one request in flight, some of them three: always, or when it is due, if they
are paced (pacing.py). The mix is produces with acks=all and acks=1, to one partition or
several, fetches of what was acknowledged, fetches that wait at the log's end, metadata,
and new connections. A client that loses its connection dials again at once.
"""

from __future__ import annotations

import errno
import random
import select
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from mpbroker.protocol.error_code import ErrorCode
from tests.bench import wire
from tests.chaos.ledger import Batch, Ledger
from tests.chaos.pacing import Pace
from tests.chaos.stalls import Interval, Stalls, latest, overlap_s
from tests.support.api_versions import without_epoch

# A request that is lost is never answered: patience hides nothing, and a machine on
# which others run may stand still for long.
STUCK_S: Final = 90.0
_REDIAL_S: Final = 0.005
_TURN_S: Final = 0.002
_RECEIVE_BYTES: Final = 1 << 18
_FETCH_BYTES: Final = 1 << 16
_LATE_KEPT: Final = 4096  # of our own late turns
_KEPT_WAITING_S: Final = 0.001
_LONG_S: Final = 0.03  # a pause of which one may want to know why
_FLOOD: Final = 20  # answers after which a client that churns dials anew
_FETCH: Final = "fetch"
_MOST_UNCHECKED: Final = 500
_IN_PROGRESS: Final = {0, errno.EINPROGRESS, errno.EAGAIN}


class Expected(NamedTuple):
    """An answer that must come."""

    correlation_id: int
    what: str
    due: float  # since when it has been wanted, if the client is paced
    asked_at: float
    patience_s: float  # so long the broker was allowed to wait before it answers
    check: Callable[[bytes], None]


class Pause(NamedTuple):
    """What a client waited for, and when; seconds of time.monotonic()."""

    what: str
    begin: float
    asked_at: float
    end: float
    own_s: float  # of that, how long the clients' process was at work
    address: tuple[str, int]  # of the listener
    port: int  # the client's own


Witness = Callable[[Pause], Callable[[], str]]


class Client:
    """One connection after another, as long as the fleet runs."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.fleet = fleet
        self.rng = random.Random(f"{fleet.seed} {number}")
        self.window = 3 if number % 4 == 0 else 1
        self.churns = number % 8 == 7
        self.pace = Pace(self.rng, fleet.rate / fleet.count)
        self.address = fleet.addresses[number % len(fleet.addresses)]
        self.sock: socket.socket | None = None
        self.connected = False
        self.expected: deque[Expected] = deque()
        self.disconnects = 0
        self.worst_pause_s = 0.0
        self.worst_what = ""
        self.stuck = False
        self.redial_at = 0.0
        self._received = bytearray()
        self._unsent = b""
        self._correlation_id = 0
        self._answers = 0
        # Since when it waits, and whether for a connection.
        self._waits_since = time.monotonic()
        self._cut_off = True
        # Since when this one connection owes the answer that is next.
        self._owed_since = time.monotonic()

    # -- the connection ------------------------------------------------------------

    def dial(self, now: float) -> None:
        self.sock = sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connected = False
        if sock.connect_ex(self.address) not in _IN_PROGRESS:
            self._refused(now)
            return
        self.fleet.register(self, select.EPOLLOUT)

    def _refused(self, now: float) -> None:
        self.fleet.refused += 1
        self._close()
        self.redial_at = now + _REDIAL_S

    def _close(self) -> None:
        if self.sock is not None:
            self.fleet.forget(self)
            self.sock.close()
            self.sock = None
        self.expected.clear()
        self._received.clear()
        self._unsent = b""
        self._answers = 0

    def hang_up(self) -> None:
        """End the connection of our own accord."""
        self._close()

    def _lost(self, now: float) -> None:
        self.disconnects += 1
        if self.expected:
            self.pace.again(self.expected[0].due)
        else:
            self._waits_since = now
        self._cut_off = True
        self._close()
        self.redial_at = now

    def happens(self, events: int, now: float) -> None:
        """Deal with what epoll says of its socket."""
        assert self.sock is not None
        if not self.connected:
            if self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._refused(now)
                return
            self.connected = True
            self.fleet.modify(self, select.EPOLLIN)
            self._ask(now)
            return
        if events & select.EPOLLOUT:
            self._send(now)
        if self.sock is not None and events & ~select.EPOLLOUT:
            self._receive(now)

    # -- questions -----------------------------------------------------------------

    def _ask(self, now: float) -> None:
        """Fill the window with what is due."""
        if self.fleet.quiet or self._has_had_enough or self.pace.due > now:
            return
        if not self.expected:
            self._owed_since = now
            if not self._cut_off:
                self._waits_since = now
        frames = []
        while len(self.expected) < self.window and self.pace.due <= now:
            frames.append(self._next_request(now))
        if frames:
            self._unsent += b"".join(frames)
            self._send(now)

    def _next_request(self, now: float) -> bytes:
        kind = self.rng.random()
        if kind < 0.62:
            return self._produce(now)
        if kind < 0.80:
            where = self.fleet.ledger.some_batch(self.rng.random())
            if where is not None:
                return self._fetch(now, *where, 0)
        elif kind < 0.90:
            partition = self.rng.randrange(self.fleet.ledger.partitions)
            end = self.fleet.ledger.ends[partition]
            return self._fetch(now, partition, end, self.rng.choice((0, 20, 100)))
        elif kind < 0.95:
            return self._same(now, "api versions", wire.api_versions(), without_epoch)
        metadata = wire.metadata([self.fleet.ledger.topic])
        return self._same(now, "metadata", metadata, bytes)

    def _stamped(
        self,
        now: float,
        framed: bytes,
        what: str,
        check: Callable[[bytes], None],
        patience_s: float = 0.0,
    ) -> bytes:
        self._correlation_id += 1
        stamped = bytearray(framed)
        struct.pack_into(">i", stamped, wire.CORRELATION_ID_AT, self._correlation_id)
        due = self.pace.asked(patience_s)
        asked_at = time.monotonic()  # other clients' turns may have come before
        self.expected.append(
            Expected(self._correlation_id, what, due, asked_at, patience_s, check)
        )
        return bytes(stamped)

    def _produce(self, now: float) -> bytes:
        fleet, rng = self.fleet, self.rng
        several = min(1 if rng.random() < 0.75 else 4, fleet.ledger.partitions)
        size = 100 if rng.random() < 0.97 else rng.randrange(13_000, 120_000)
        size //= several  # the broker takes frames of 1 MiB
        batches = [
            fleet.ledger.send(
                next(fleet.numbers), partition, 1 if rng.random() < 0.8 else 3, size
            )
            for partition in rng.sample(range(fleet.ledger.partitions), several)
        ]
        acks = 1 if rng.random() < fleet.acks_1_share else -1
        framed = wire.produce_to_several(
            fleet.ledger.topic,
            [(batch.partition, batch.encode()) for batch in batches],
            acks=acks,
        )

        def check(payload: bytes, batches: Sequence[Batch] = batches) -> None:
            answers = wire.parse_produce_to_several(payload)
            for batch, answer in zip(batches, answers, strict=True):
                if answer.error_code:
                    fleet.note_error("produce", answer.error_code)
                else:
                    fleet.ledger.acknowledge(batch, answer.base_offset)

        return self._stamped(now, framed, f"produce acks={acks}", check)

    def _fetch(self, now: float, partition: int, offset: int, wait_ms: int) -> bytes:
        fleet = self.fleet
        framed = wire.fetch(
            fleet.ledger.topic,
            partition,
            offset,
            max_bytes=_FETCH_BYTES,
            max_wait_ms=wait_ms,
        )
        must_be_there = offset < fleet.ledger.ends[partition]

        def check(payload: bytes) -> None:
            answer = wire.parse_fetch(payload)
            if answer.error_code:
                fleet.note_error("fetch", answer.error_code)
                return
            records = wire.iter_records(answer.records)
            where = f"fetch of {partition}@{offset}"
            if must_be_there and (not records or records[0].offset != offset):
                first = records[0].offset if records else None
                fleet.ledger.complain(f"{where} begins with {first}")
            offsets = [record.offset for record in records]
            if offsets != list(
                range(offsets[0], offsets[0] + len(offsets)) if offsets else ()
            ):
                fleet.ledger.complain(f"{where} has gaps: {offsets[:9]}")
            fleet.ledger.read(partition, records)

        return self._stamped(now, framed, _FETCH, check, wait_ms / 1000)

    def _same(
        self, now: float, what: str, framed: bytes, lasting: Callable[[bytes], object]
    ) -> bytes:
        """A question to whose answer ``lasting`` returns what never changes."""
        fleet = self.fleet

        def check(payload: bytes) -> None:
            told = lasting(payload[4:])
            if told != fleet.constant.setdefault((what, self.address), told):
                fleet.ledger.complain(f"{what} answered {payload[4:]!r:.80}")

        return self._stamped(now, framed, what, check)

    def _send(self, now: float) -> None:
        assert self.sock is not None
        try:
            sent = self.sock.send(self._unsent) if self._unsent else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._lost(now)
            return
        was_blocked, self._unsent = self._unsent, self._unsent[sent:]
        if self._unsent or len(was_blocked) > sent:
            self.fleet.modify(self, select.EPOLLIN | select.EPOLLOUT)
        elif sent:
            self.fleet.modify(self, select.EPOLLIN)

    # -- answers -------------------------------------------------------------------

    def _receive(self, now: float) -> None:
        assert self.sock is not None
        try:
            data = self.sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost(now)
            return
        received = self._received
        received += data
        while len(received) >= 4:
            end = 4 + int.from_bytes(received[:4], "big")
            if len(received) < end:
                break
            payload = bytes(received[4:end])
            del received[:end]
            self._answered(payload, now)
        if self._has_had_enough and not self.expected:
            self._close()
            self._waits_since, self._cut_off = now, True
            self.redial_at = now
        else:
            self._ask(now)

    @property
    def _has_had_enough(self) -> bool:
        """It asks nothing more of this connection."""
        return self.churns and self._answers >= _FLOOD

    def _answered(self, payload: bytes, now: float) -> None:
        fleet = self.fleet
        if not self.expected:
            fleet.ledger.complain(f"an answer to no question: {payload!r:.40}")
            return
        expected = self.expected.popleft()
        self._note_pause(expected, now)
        fleet.answers += 1
        self._answers += 1
        answered = int.from_bytes(payload[:4], "big")
        if answered != expected.correlation_id:
            fleet.ledger.complain(
                f"correlation id {answered} in answer to {expected.correlation_id}"
                f" ({expected.what})"
            )
            return
        if self.pace.is_open and expected.what == _FETCH:
            fleet.check_later(expected, payload)
        else:
            fleet.check(expected, payload)

    def _note_pause(self, expected: Expected, now: float) -> None:
        since = expected.due if self.pace.is_open else self._waits_since
        pause = now - since - expected.patience_s
        self._waits_since, self._cut_off = now, False
        self._owed_since = now
        if pause > self.worst_pause_s:
            self.worst_pause_s = pause
            self.worst_what = expected.what
        self.fleet.note_pause(self, expected, pause, now)

    def look(self, now: float, stuck_s: float) -> None:
        """Dial if it has to; see whether it waits for ever."""
        if self.sock is None:
            if max(self.redial_at, self.pace.due) <= now and not self.fleet.quiet:
                self.dial(now)
            return
        if self.expected:
            patience_s = self.expected[0].patience_s + stuck_s
            self.stuck = now - self._owed_since > patience_s
        if self.connected and not self._unsent:
            self._ask(now)

    @property
    def port(self) -> int:
        """Of its own end; 0: it has no connection."""
        return self.sock.getsockname()[1] if self.sock is not None else 0

    def describe(self) -> str:
        """Who it is and what it waits for."""
        owed = ", ".join(f"{e.correlation_id} {e.what}" for e in self.expected)
        return (
            f"the client at port {self.port} of {self.address[1]} waits for [{owed}];"
            f" it has {len(self._received)} bytes of an answer and"
            f" {len(self._unsent)} to send"
        )

    def rest(self) -> None:
        """Nothing is owed to it while nothing is asked."""
        self._waits_since = time.monotonic()
        self.pace.begin(self._waits_since)
        self.worst_pause_s, self.worst_what = 0.0, ""


class Fleet:
    """All clients of one broker.

    Args:
        addresses: of the broker's listeners; clients are spread over them.
        count: how many clients.
        seed: of all that is random.
        stuck_s: who waits longer for an answer waits for ever.
        acks_1_share: of the produces, how many are content with acks=1.
        stalls: who sees when the machine stands still, if anybody does.
        rate: questions a second, of all clients; 0: as fast as they are answered.
        witness: asked what became of a long pause, while that can be seen.

    Attributes:
        worst_net_s: the longest pause without the time in which a core stood still
            or this process was late, during that very pause.
        worst_story: what became of it, if it was long.
        may_be_closed: partitions may be closed until transactions are loaded, as after
            an unclean stop: that is no error.
        closed: how often a client was told so.
    """

    def __init__(
        self,
        addresses: list[tuple[str, int]],
        count: int,
        seed: int = 1,
        stuck_s: float = STUCK_S,
        acks_1_share: float = 0.3,
        stalls: Stalls | None = None,
        rate: float = 0.0,
        witness: Witness | None = None,
    ) -> None:
        self.addresses = addresses
        self.seed = seed
        self.stuck_s = stuck_s
        self.acks_1_share = acks_1_share
        self.numbers = iter(range(1 << 62))
        self.errors: Counter[str] = Counter()
        self.may_be_closed = False
        self.closed = 0
        self.refused = 0
        self.answers = 0
        self.quiet = False
        self.own_stall_s = 0.0
        self.worst_net_s = 0.0
        self.worst_story: Callable[[], str] | None = None
        self.count, self.rate = count, rate
        self._stalls = stalls
        self._witness = witness
        self._untold: Pause | None = None
        self._late: deque[Interval] = deque(maxlen=_LATE_KEPT)
        self._at_work: deque[Interval] = deque(maxlen=_LATE_KEPT)
        self.constant: dict[tuple[str, tuple[str, int]], object] = {}
        self.ledger = Ledger("none", 1)
        self._epoll = select.epoll()
        self._by_fd: dict[int, Client] = {}
        self._turned_at = time.monotonic()
        self._look_at = 0.0
        self._unchecked: deque[tuple[Expected, bytes]] = deque()
        self.clients = [Client(self, number) for number in range(count)]

    def set_pace(self, rate: float) -> None:
        """Ask at another rate from the next topic on."""
        self.rate = rate
        for client in self.clients:
            client.pace = Pace(client.rng, rate / self.count)

    def begin(self, topic: str, partitions: int) -> Ledger:
        """Turn to a new topic; the old one's ledger is closed."""
        with wire.Connection(self.addresses[0]) as connection:
            connection.create_topic(topic, partitions)
        self.ledger = Ledger(topic, partitions)
        self.constant.clear()
        self.quiet = False
        self._turned_at = time.monotonic()
        for client in self.clients:
            client.rest()
        return self.ledger

    def forget_pauses(self) -> None:
        """Begin to look for pauses now."""
        self.own_stall_s = self.worst_net_s = 0.0
        self.worst_story = self._untold = None
        for client in self.clients:
            client.worst_pause_s, client.worst_what = 0.0, ""

    def note_pause(
        self, client: Client, answered: Expected, pause_s: float, now: float
    ) -> None:
        """A client has been answered after a pause that ends now."""
        if pause_s <= self.worst_net_s:
            return
        begin = now - pause_s
        others = [] if self._stalls is None else self._stalls.during(begin, now)
        net_s = pause_s - overlap_s([*latest(self._late, begin), *others], begin, now)
        if net_s <= self.worst_net_s:
            return
        self.worst_net_s = net_s
        if self._witness is not None and net_s >= _LONG_S:
            self._untold = Pause(
                answered.what,
                begin,
                answered.asked_at,
                now,
                overlap_s(latest(self._at_work, begin), begin, now),
                client.address,
                # Of several questions the slot has the stamps of the next one.
                0 if client.expected else client.port,
            )

    def note_error(self, what: str, code: int) -> None:
        """Count an error that a client was told."""
        if code == ErrorCode.NOT_LEADER_OR_FOLLOWER and self.may_be_closed:
            self.closed += 1
        else:
            self.errors[f"{what}: {code}"] += 1

    def check(self, expected: Expected, payload: bytes) -> None:
        """See whether an answer is what it must be."""
        try:
            expected.check(payload)
        except (wire.AnswerError, IndexError, struct.error) as error:
            self.ledger.complain(f"{expected.what}: {error!r}: {payload!r:.60}")

    def check_later(self, expected: Expected, payload: bytes) -> None:
        """The same when there is time: some milliseconds, in which others wait."""
        self._unchecked.append((expected, payload))
        if len(self._unchecked) > _MOST_UNCHECKED:
            self.check(*self._unchecked.popleft())

    def register(self, client: Client, events: int) -> None:
        assert client.sock is not None
        self._by_fd[client.sock.fileno()] = client
        self._epoll.register(client.sock.fileno(), events)

    def modify(self, client: Client, events: int) -> None:
        assert client.sock is not None
        self._epoll.modify(client.sock.fileno(), events)

    def forget(self, client: Client) -> None:
        assert client.sock is not None
        if self._by_fd.pop(client.sock.fileno(), None) is not None:
            self._epoll.unregister(client.sock.fileno())

    def turn(self) -> None:
        """Do what can be done now, for all clients; wait for it a moment."""
        events = self._epoll.poll(_TURN_S)
        now, worked_s = time.monotonic(), time.thread_time()
        # Nobody but ourselves is late then.
        late_s = now - self._turned_at - _TURN_S
        if late_s > 0:
            self.own_stall_s = max(self.own_stall_s, late_s)
            self._late.append((now - late_s, now))
        for fd, event in events:
            client = self._by_fd.get(fd)
            if client is not None:
                client.happens(event, time.monotonic())
        if not events and self._unchecked:
            self.check(*self._unchecked.popleft())
        if now >= self._look_at:
            self._look_at = now + _TURN_S
            for client in self.clients:
                client.look(now, self.stuck_s)
        if self._untold is not None and self._witness is not None:
            # Once a turn: one who looks keeps the others waiting, who then were worse.
            looks_at = time.monotonic()
            self.worst_story = self._witness(self._untold)
            self._untold = None
            self._late.append((looks_at, time.monotonic()))
        self._turned_at = ended = time.monotonic()
        self._at_work.append((now, ended))
        # Nothing blocks here: the rest of it somebody else had the core.
        kept_s = ended - now - (time.thread_time() - worked_s)
        if kept_s > _KEPT_WAITING_S:
            self._late.append((ended - kept_s, ended))

    def was_away(self) -> None:
        """We did something else meanwhile; the time is not the broker's."""
        self._turned_at = time.monotonic()

    def settle(self) -> bool:
        """Ask nothing more; wait for what is owed. False if somebody is stuck."""
        self.quiet = True
        while not self.stuck and any(client.expected for client in self.clients):
            self.turn()
        while self._unchecked:
            self.check(*self._unchecked.popleft())
        return not self.stuck

    def hang_up(self) -> None:
        for client in self.clients:
            client.hang_up()

    def close(self) -> None:
        self.hang_up()
        self._epoll.close()

    @property
    def stuck(self) -> int:
        """How many clients wait for ever."""
        return sum(client.stuck for client in self.clients)

    @property
    def disconnects(self) -> int:
        return sum(client.disconnects for client in self.clients)

    @property
    def worst(self) -> Client:
        """The client with the longest pause."""
        return max(self.clients, key=lambda client: client.worst_pause_s)
