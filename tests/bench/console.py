"""What the console costs: its first page, five viewers, and searches of 50 MB.

`console` looks at pages. `console/search` searches in turns with a pause of the same
length, beside a producer that sends a record every few ms and waits for each answer
(acks=all): "x p99" is its p99 of all searches, divided by that of all pauses. "bare" is
bytes.find() over as many bytes in memory, between them, and so what the machine gave
just then. All of it is of one process of clients, which shares the cores with the
broker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Final

from mpbroker import Producer
from mpbroker.inspect.load import cpu_seconds
from tests.bench.cases import Case, Context
from tests.console.serving import CONSOLE, Browser, browser
from tests.exporter.asking import pids_of, wait_until
from tests.support.broker import Broker

_NEEDLE: Final = "none"
_BYTES: Final = 50_000_000
_SMALL: Final = _BYTES // 10
_VALUE: Final = b"x" * 1000
_PAUSE_S: Final = 0.005
_VIEWERS: Final = 5
_LOOK_S: Final = 2.0  # as often as the page does
_TURNS: Final = 5
_FILES: Final = ("", "console.css", "console.js", "overview.js")


class _Pacer:
    """A producer of single records in a thread of its own."""

    def __init__(self, bootstrap: str) -> None:
        self.times: list[float] = []
        self._is_over = False
        self._producer = Producer(bootstrap_servers=bootstrap, linger_ms=0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over:
            began = time.perf_counter()
            self._producer.send("paced", _VALUE).result(60)
            self.times.append(time.perf_counter() - began)
            time.sleep(_PAUSE_S)

    def during(self, work: Callable[[], None]) -> list[float]:
        """Return the seconds of each record sent meanwhile."""
        first = len(self.times)
        work()
        return self.times[first:]

    def close(self) -> None:
        self._is_over = True
        self._thread.join()
        self._producer.close()


def _first_page(one: Browser) -> float:
    """Return the ms in which the page, its files and the overview come."""
    times = []
    for _ in range(_TURNS):
        began = time.perf_counter()
        for name in _FILES:
            assert one.ask("GET", f"/{name}").status == 200
        assert one.get("session").status == one.get("overview").status == 200
        times.append(time.perf_counter() - began)
    return median(times) * 1000


def _cpu(broker: Broker, seconds: float, viewers: int) -> float:
    """Return the share of a core that console and exporter take."""
    until = time.monotonic() + seconds

    def view() -> None:
        one = browser(broker, "")
        while time.monotonic() < until:
            assert one.get("overview").status == 200
            time.sleep(min(_LOOK_S, max(0.0, until - time.monotonic())))

    pids = pids_of(broker, "console", "exporter")
    threads = [threading.Thread(target=view) for _ in range(viewers)]
    before = sum(map(cpu_seconds, pids))
    for each in threads:
        each.start()
    time.sleep(seconds)
    for each in threads:
        each.join()
    return (sum(map(cpu_seconds, pids)) - before) / seconds


def _search(one: Browser, topic: str, size: int) -> float:
    """Search all records for what none has; return MB/s of their values."""
    at = 0
    began = time.perf_counter()
    while True:
        page = one.get("search", topic=topic, partition=0, offset=at, text=_NEEDLE)
        at = page.json["next"]
        if at >= page.json["end"]:
            return size / (time.perf_counter() - began) / 1e6


def _bare(data: bytes) -> float:
    """Return the MB/s of the bare search."""
    began = time.perf_counter()
    assert data.find(_NEEDLE.encode()) < 0
    return len(data) / (time.perf_counter() - began) / 1e6


def _rig(stack: ExitStack) -> Broker:
    scratch = stack.enter_context(TemporaryDirectory(prefix="mpbroker-bench-"))
    return stack.enter_context(Broker(Path(scratch) / "data", CONSOLE))


def _pages(context: Context) -> dict[str, float]:
    seconds = max(10.0, context.seconds)
    with ExitStack() as stack:
        broker = _rig(stack)
        one = browser(broker, "")
        wait_until(lambda: one.get("overview").json["overview"])
        stack.callback(_Pacer(broker.bootstrap).close)
        page_ms = _first_page(one)
        alone = _cpu(broker, seconds, 0)
        viewed = _cpu(broker, seconds, _VIEWERS)
    return {
        "page_ms": page_ms,
        "console_cpu_percent": 100 * alone,
        "viewers_cpu_percent": 100 * (viewed - alone),
    }


def _searches(context: Context) -> dict[str, float]:
    with ExitStack() as stack:
        broker = _rig(stack)
        _fill(broker.bootstrap, "plain", _BYTES, _VALUE, {})
        # Batches of one or two records.
        _fill(broker.bootstrap, "small", _SMALL, _VALUE[:100], {"batch_size": 200})
        # Compressed to a third.
        text = b"".join(b"%08x%016d" % (n * 2654435761 % 2**32, n) for n in range(40))
        _fill(broker.bootstrap, "zstd", _BYTES, text, {"compression_type": "zstd"})
        one = browser(broker, "")
        data = _VALUE * (_BYTES // len(_VALUE))
        pacer = _Pacer(broker.bootstrap)
        stack.callback(pacer.close)
        small, zstd = (
            median(_search(one, topic, size) for _ in range(3))
            for topic, size in (("small", _SMALL), ("zstd", _BYTES))
        )
        (pid,) = pids_of(broker, "console")
        rates, bare, quiet, busy, cpu_s = list[float](), list[float](), [], [], 0.0
        until = time.monotonic() + 4 * max(5.0, context.seconds)
        while time.monotonic() < until:
            bare.append(_bare(data))
            before, began = cpu_seconds(pid), time.monotonic()
            busy += pacer.during(lambda: rates.append(_search(one, "plain", _BYTES)))
            cpu_s += cpu_seconds(pid) - before
            took = time.monotonic() - began
            quiet += pacer.during(lambda took=took: time.sleep(took))
    return {
        "search_mb_per_s": median(rates),
        "bare_search_mb_per_s": median(bare),
        "small_search_mb_per_s": small,
        "zstd_search_mb_per_s": zstd,
        "search_cpu_s_per_gib": cpu_s / len(rates) / _BYTES * 2**30,
        "p99_ratio": quantiles(busy, n=100)[-1] / quantiles(quiet, n=100)[-1],
    }


def _fill(
    bootstrap: str, topic: str, size: int, value: bytes, settings: dict[str, object]
) -> None:
    with Producer({"bootstrap_servers": bootstrap} | settings) as producer:
        for _ in range(size // len(value)):
            producer.send(topic, value, partition=0)


CASES: Final = [
    Case("console/pages", _pages, starts_brokers=True),
    Case("console/search", _searches, starts_brokers=True),
]
