"""End to end at 200 messages a second, and how soon a waiting fetch is answered."""

from __future__ import annotations

import select
import struct
import threading
import time
from collections.abc import Sequence
from typing import Final, Self

from tests.bench import wire
from tests.bench.brokers import Broker, scratch_directory
from tests.bench.cases import Case, Context
from tests.bench.wake_path import HandedOverPath, WakePath

RATE_PER_S: Final = 200
VALUE_BYTES: Final = 100
WARMUP_MESSAGES: Final = 100
LEAST_SECONDS: Final = 5.0  # 1,000 messages: ten of them above the p99
_IN_TURN: Final = 100  # so many through the broker, then as many without


def percentiles_ms(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the 50th and 99th percentile in milliseconds."""
    ordered = sorted(seconds)
    return (
        ordered[len(ordered) // 2] * 1e3,
        ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3,
    )


class Pace:
    """A message every five milliseconds, and none sooner after a late one."""

    def __init__(self) -> None:
        self._due = time.perf_counter()

    def wait(self) -> None:
        now = time.perf_counter()
        # Time enough for a fetch, sent just before, to be waiting.
        self._due = max(self._due + 1 / RATE_PER_S, now + 0.001)
        time.sleep(self._due - now)


def _raw(context: Context) -> dict[str, float]:
    """Produce on one connection while a fetch waits on another; one thread for both.

    From the produce's send to the fetch's answer is the message's whole way through the
    broker; from the produce's answer to the fetch's is the price of waiting. In turn,
    by the hundred, the same without a broker: what the machine could do just then.
    """
    count = int(max(context.seconds, LEAST_SECONDS) * RATE_PER_S)
    whole: list[float] = []
    after_ack: list[float] = []
    bare: list[float] = []
    pace = Pace()
    with (
        scratch_directory() as directory,
        WakePath(directory) as path,
        Route(context.broker) as route,
    ):
        for _ in range(WARMUP_MESSAGES):
            route.pass_on(pace)
        cpu = 0.0
        while len(whole) < count:
            before = context.broker.tree.cpu_seconds()
            for _ in range(_IN_TURN):
                taken, taken_after_ack = route.pass_on(pace)
                whole.append(taken)
                after_ack.append(taken_after_ack)
            cpu += context.broker.tree.cpu_seconds() - before
            for _ in range(_IN_TURN):
                pace.wait()
                bare.append(path.pass_on(route.batch))
    p50, p99 = percentiles_ms(whole)
    ack_p50, ack_p99 = percentiles_ms(after_ack)
    bare_p50, bare_p99 = percentiles_ms(bare)
    return {
        "p50_ms": p50,
        "p99_ms": p99,
        "bound_p50_ms": bare_p50,
        "bound_p99_ms": bare_p99,
        "after_ack_p50_ms": ack_p50,
        "after_ack_p99_ms": ack_p99,
        "cpu_us": cpu / len(whole) * 1e6,
    }


class Route:
    """A message's way through a broker: one connection produces, another fetches."""

    def __init__(self, broker: Broker) -> None:
        self._topic = broker.topic("bench-latency")
        self.batch = wire.record_batch([wire.RecordSpec(wire.filler(VALUE_BYTES))])
        self._request = wire.produce(self._topic, 0, self.batch)
        self._producer = broker.connect()
        self._consumer = broker.connect()
        self._offset = self._producer.end_offset(self._topic, 0)
        self._poll = select.poll()
        self._poll.register(self._producer.fileno(), select.POLLIN)
        self._poll.register(self._consumer.fileno(), select.POLLIN)
        self._other = {
            self._producer.fileno(): _poll_of(self._consumer),
            self._consumer.fileno(): _poll_of(self._producer),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._producer.close()
        self._consumer.close()

    def pass_on(self, pace: Pace) -> tuple[float, float]:
        """Return the seconds to the fetch's answer, and those of them after the ack."""
        offset = self._offset
        self._consumer.send(
            wire.fetch(self._topic, 0, offset, max_bytes=4096, max_wait_ms=10_000)
        )
        pace.wait()
        sent = time.perf_counter()
        self._producer.send(self._request)
        arrived: dict[int, float] = {}
        waiting = self._poll
        while len(arrived) < 2:
            # Nothing is read before both are there: what the reading takes here would
            # count as the broker's.
            events = waiting.poll(10_000)
            now = time.perf_counter()
            if not events:
                raise wire.AnswerError("nothing within ten seconds")
            for fd, _event in events:
                arrived[fd] = now
                waiting = self._other[fd]
        for fd in arrived:
            _check(fd, self._producer, self._consumer, offset)
        self._offset += 1
        fetched = arrived[self._consumer.fileno()]
        acked = arrived[self._producer.fileno()]
        return fetched - sent, max(0.0, fetched - acked)


def _poll_of(connection: wire.Connection) -> select.poll:
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return poll


def _check(
    fd: int, producer: wire.Connection, consumer: wire.Connection, offset: int
) -> None:
    if fd == producer.fileno():
        produced = wire.parse_produce(producer.receive())
        if produced != (0, offset):
            raise wire.AnswerError(f"{produced} where offset {offset} was due")
    else:
        records = wire.iter_records(wire.parse_fetch(consumer.receive()).records)
        if [record.offset for record in records] != [offset]:
            raise wire.AnswerError(f"{len(records)} records where {offset} was due")


def _librdkafka(context: Context) -> dict[str, float]:
    """Do the same through confluent-kafka: what a user of a common client sees.

    In turn, by the hundred, the same without a broker, and with threads in the client's
    place that do no more than hand a message over, as librdkafka's have to.
    """
    count = int(max(context.seconds, LEAST_SECONDS) * RATE_PER_S)
    bare: list[float] = []
    message = wire.record_batch([wire.RecordSpec(wire.filler(VALUE_BYTES))])
    pace = Pace()
    with (
        scratch_directory() as directory,
        WakePath(directory) as path,
        HandedOverPath(path, message) as handed,
        _RdKafkaRoute(context.broker) as route,
    ):
        for _ in range(WARMUP_MESSAGES):
            pace.wait()
            route.produce()
        route.end()  # so both sides have found their way
        while len(bare) < count:
            for _ in range(_IN_TURN):
                pace.wait()
                route.produce()
            for _ in range(_IN_TURN):
                pace.wait()
                bare.append(handed.pass_on())
        whole = route.end()
    p50, p99 = percentiles_ms(whole[WARMUP_MESSAGES:])
    bare_p50, bare_p99 = percentiles_ms(bare)
    return {
        "p50_ms": p50,
        "p99_ms": p99,
        "bound_p50_ms": bare_p50,
        "bound_p99_ms": bare_p99,
    }


class _RdKafkaRoute:
    """A producer and a consumer of librdkafka's; messages say when they were sent."""

    def __init__(self, broker: Broker) -> None:
        import confluent_kafka

        self._topic = broker.topic("bench-latency-rdkafka")
        with broker.connect() as connection:
            start = connection.end_offset(self._topic, 0)
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": broker.bootstrap,
                "group.id": "bench",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 500,
            }
        )
        self._consumer.assign([confluent_kafka.TopicPartition(self._topic, 0, start)])
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": broker.bootstrap, "linger.ms": 0, "acks": 1}
        )
        self._padding = wire.filler(VALUE_BYTES - 8)
        self._taken: list[float] = []
        self._sent = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._consume)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._consumer.close()

    def produce(self) -> None:
        """Send a message, and do not wait for anything."""
        now = time.perf_counter()
        value = struct.pack("<d", now) + self._padding
        self._producer.produce(self._topic, value, partition=0)
        self._producer.poll(0)
        self._sent += 1

    def end(self) -> list[float]:
        """Return how many seconds each message took, in their order.

        Raises:
            AnswerError: some did not come.
        """
        self._producer.flush(10)
        deadline = time.monotonic() + 10
        while len(self._taken) < self._sent and time.monotonic() < deadline:
            time.sleep(0.01)
        if len(self._taken) < self._sent:
            raise wire.AnswerError(
                f"{len(self._taken)} of {self._sent} messages came back"
            )
        return self._taken

    def _consume(self) -> None:
        while not self._is_over.is_set():
            message = self._consumer.poll(1.0)
            now = time.perf_counter()
            value = None if message is None or message.error() else message.value()
            if value is not None:
                self._taken.append(now - struct.unpack_from("<d", value)[0])


CASES: Final = [
    Case("latency/raw", _raw),
    Case("latency/librdkafka", _librdkafka),
]
