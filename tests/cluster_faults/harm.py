"""Three nodes, their database and their store; and what kills them.

A node that was killed comes back by itself after a pause, in a thread of its own.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Final

import psutil

from mpbroker.testing.cluster_fixture import NODES, init_cluster
from mpbroker.testing.postgresql import PostgreSQL, postgresql
from tests.broker.load import metadata_of
from tests.cluster_faults.ledger import Ledger
from tests.cluster_faults.load import TOPIC, Address
from tests.support.broker import Broker, BrokerFailedError
from tests.support.children import wait_until
from tests.support.footprint import session_processes
from tests.support.object_store import object_store, server
from tests.support.ports import reusable_port

# Of a node's start beside whatever else is harmed.
_START_S: Final = 90.0
_SETTINGS: Final = {
    "num.io.threads": "2",
    "num.network.threads": "1",
    "log.initial.task.delay.ms": "0",
    "group.initial.rebalance.delay.ms": "0",
    # A member whose farewell nobody has heard is missed soon; and some are missed that
    # live, so that they are fenced.
    "group.consumer.session.timeout.ms": "10000",
    "group.consumer.min.session.timeout.ms": "10000",
    "group.consumer.heartbeat.interval.ms": "2000",
    "group.consumer.min.heartbeat.interval.ms": "2000",
}
_CLUSTER_NODE: Final = "cluster-node"
_COORDINATOR: Final = "group-coordinator"
_HANDLER: Final = "request-handler"

# Drawn without putting back, so that a campaign has its share of each.
DECK: Final = (
    *("node",) * 5,
    "two nodes",
    "node without its copies",
    "node stopped",
    _CLUSTER_NODE,
    _COORDINATOR,
    _HANDLER,
    f"{_CLUSTER_NODE} and {_HANDLER}",
    "database",
)


class Cluster:
    """The cluster of a campaign.

    Args:
        nodes: not started.
        database: runs.
        draw: the source of what is random.
        ledger: told of what must not be.

    Attributes:
        addresses: where the nodes are, running or not.
        deaths: how often each kind of harm was done.
        node_deaths: how many nodes were killed or stopped as a whole.
    """

    def __init__(
        self,
        nodes: Sequence[Broker],
        database: PostgreSQL,
        draw: random.Random,
        ledger: Ledger,
    ) -> None:
        self._nodes = nodes
        self._database = database
        self._has_database = Event()
        self._has_database.set()
        self._outages = 0
        self._draw = draw
        self._ledger = ledger
        self._deck: list[str] = []
        # setpriv ends a process with the thread that has started it: these threads
        # live as long as the pool.
        self._pool = ThreadPoolExecutor(len(nodes))
        self._returns: list[Future[None]] = [
            self._pool.submit(self._start, each) for each in nodes
        ]
        self.addresses: list[Address] = [
            _address(str(each.config["listeners"]).removeprefix("PLAINTEXT://"))
            for each in nodes
        ]
        self.bootstrap = ",".join(f"{host}:{port}" for host, port in self.addresses)
        self.deaths: Counter[str] = Counter()
        self.node_deaths = 0

    # -- harm --------------------------------------------------------------------------

    def do_harm(self) -> str:
        """Kill the next thing; return what, in words."""
        if not self._deck:
            self._deck = self._draw.sample(DECK, len(DECK))
        kind = self._deck.pop()
        self.deaths[kind] += 1
        match kind:
            case "node":
                return self._kill_nodes(1)
            case "two nodes":
                return self._kill_nodes(2)
            case "node without its copies":
                return self._kill_nodes(1, loses_copies=True)
            case "node stopped":
                return self._stop_node()
            case "database":
                return self._kill_database()
            case _:
                return self._kill_processes(kind.split(" and "))

    @property
    def has_done_all(self) -> bool:
        """Whether each kind of harm was done as often as the others."""
        return not self._deck

    def _kill_nodes(self, count: int, *, loses_copies: bool = False) -> str:
        self._wait_for_running(count)
        told = []
        for number in self._draw.sample(self._running(), count):
            # Back before its lease has ended, or long after.
            short = self._draw.random() < 0.5
            pause_s = self._draw.uniform(0, 2) if short else self._draw.uniform(5, 10)
            self._nodes[number].kill()
            if loses_copies:
                for each in self._nodes[number].data_dir.glob(f"{TOPIC}-*"):
                    shutil.rmtree(each)
            self._returns[number] = self._pool.submit(
                self._come_back, self._nodes[number], pause_s
            )
            self.node_deaths += 1
            what = f"killed{' and robbed' if loses_copies else ''}"
            told.append(f"node {number + 1} {what}, back in {pause_s:.1f} s")
        return "; ".join(told)

    def _stop_node(self) -> str:
        self._wait_for_running(1)
        number = self._draw.choice(self._running())
        pause_s = self._draw.uniform(7, 12)
        pid = self._nodes[number].pid
        _signal_session(pid, signal.SIGSTOP)
        self._returns[number] = self._pool.submit(self._continue, pid, pause_s)
        self.node_deaths += 1
        return f"node {number + 1} stopped for {pause_s:.1f} s"

    def _kill_database(self) -> str:
        pause_s = self._draw.choice((0.0, self._draw.uniform(0.5, 9)))
        self._has_database.clear()
        self._outages += 1
        self._database.kill()
        time.sleep(pause_s)
        self._database.start()
        self._has_database.set()
        return f"database killed, back in {pause_s:.1f} s"

    def _kill_processes(self, titles: list[str]) -> str:
        self._wait_for_running(1)
        number = self._draw.choice(self._running())
        until = time.monotonic() + _START_S
        while not (found := self._processes(number, titles)):
            # They were killed a moment ago, and have no successor yet.
            if time.monotonic() > until:
                self._ledger.complain(f"node {number + 1} has no {titles}")
                break
            time.sleep(0.05)
        # Then nobody knows any more whether a request was carried out
        # (docs/cluster.md: "both at once").
        both = len(titles) > 1
        if both:
            self._ledger.may_be_sent_again()
        for each in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        if both:
            self._ledger.may_be_sent_again()
        return f"{' and '.join(titles)} of node {number + 1} killed ({len(found)})"

    def _processes(self, number: int, titles: list[str]) -> list[psutil.Process]:
        """Return one process of a node by a title, or all by several titles."""
        found: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self._nodes[number].pid).children(recursive=True)
            for title in titles:
                named = [each for each in family if title in _title(each)]
                if not named:
                    return []
                found += named if len(titles) > 1 else named[:1]
        return found

    def _running(self) -> list[int]:
        return [number for number, each in enumerate(self._returns) if each.done()]

    def _wait_for_running(self, count: int) -> None:
        while len(self._running()) < count:
            time.sleep(0.05)

    # -- and what follows --------------------------------------------------------------

    def _come_back(self, node: Broker, pause_s: float) -> None:
        time.sleep(pause_s)
        self._start(node)

    def _continue(self, pid: int, pause_s: float) -> None:
        time.sleep(pause_s)
        _signal_session(pid, signal.SIGCONT)

    def _start(self, node: Broker) -> None:
        """Start a node; as often as it takes, if it finds no database."""
        until = time.monotonic() + _START_S
        while True:
            outages = self._outages
            try:
                node.start()
                return
            except BrokerFailedError as error:
                if outages == self._outages and self._has_database.is_set():
                    self._ledger.complain(f"a node does not start: {error}")
                    return
                if time.monotonic() > until:
                    self._ledger.complain(f"a node does not start again: {error}")
                    return
            self._has_database.wait(_START_S)

    def heal(self) -> None:
        """Wait until all nodes are back."""
        for each in self._returns:
            each.result()

    def close(self) -> None:
        """Stop all nodes, and expect that they leave nothing behind."""
        self.heal()
        for each in self._nodes:
            try:
                each.close()
            except BrokerFailedError as error:
                self._ledger.complain(str(error))
            if "Traceback" in each.log_path.read_text():
                self._ledger.complain(f"a traceback in {each.log_path.name}")
        self._pool.shutdown()

    def kill(self) -> None:
        """End everything at once."""
        self.heal()
        for each in self._nodes:
            each.kill()
        self._pool.shutdown()


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def _signal_session(session: int, number: signal.Signals) -> None:
    """Send a signal to all processes of a session, the first one first."""
    for pid in sorted(session_processes(session), key=lambda each: each != session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return host, int(port)


@contextlib.contextmanager
def cluster(folder: Path, draw: random.Random, ledger: Ledger) -> Iterator[Cluster]:
    """Run a cluster: with SeaweedFS if it is installed, else with a directory.

    Args:
        folder: for all files; it must exist.
        draw: the source of what is random.
        ledger: told of what must not be.
    """
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(postgresql())
        environ: dict[str, str] = {}
        (folder / "store").mkdir()
        store = f"file://{folder / 'store'}"
        if server() is not None:
            running = stack.enter_context(object_store(folder / "store"))
            environ, store = running.environ, "s3://lake/campaign"
        url = database.url("postgres")
        init_cluster(url, store, {**os.environ, **environ})
        nodes = [
            Broker(
                folder / f"node-{number}",
                {
                    **_SETTINGS,
                    "node.id": number,
                    "cluster.database.url": url,
                    "diskless.storage.url": store,
                    # Each start takes the same one again.
                    "listeners": f"PLAINTEXT://127.0.0.1:{reusable_port()}",
                },
                environ=environ,
            )
            for number in range(1, NODES + 1)
        ]
        made = Cluster(nodes, database, draw, ledger)
        try:
            made.heal()
            # librdkafka fails requests to a node which the next Metadata does not name,
            # and a node hears of another one half a second after its start.
            wait_until(
                lambda: all(len(metadata_of(each).brokers) == NODES for each in nodes)
            )
            yield made
        except BaseException:
            made.kill()
            raise
        made.close()
