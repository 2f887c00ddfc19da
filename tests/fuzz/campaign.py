"""A fuzzing run: a broker, hostile peers, bystanders, and what must hold at the end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Final

from mpbroker.protocol.messages.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
)
from tests.bench import wire
from tests.bench.processes import ProcessTree
from tests.fuzz import bystander, scenarios
from tests.fuzz.attack import Attacker, BrokenPromiseError
from tests.fuzz.recent import TOPIC_ID
from tests.support.broker import Broker

BYSTANDERS: Final = 2
# Scenarios after which memory is looked at, the last time for good: until each has
# been played often everywhere, processes grow by what they load and remember once.
WARM_UPS: Final = (200, 5000)
CHECK_EVERY: Final = 100
# Python's heaps breathe, and arenas keep some blocks warm; a leak of one small request
# a scenario would be above this within the minute.
GROWTH_BYTES: Final = 24 << 20
SETTLE_S: Final = 20.0
RECENT: Final = 50
KEEP: Final = {"retention.ms": "-1"}


class FuzzFailureError(Exception):
    """Something that must hold did not; names the seed, the number and the files."""


class Campaign:
    """One run against one broker.

    Args:
        broker: it runs.
        seed: of all scenarios.
        save_dir: for the input of a failure.
        growth_bytes: how much larger the broker may be afterwards.
    """

    def __init__(
        self,
        broker: Broker,
        seed: int,
        save_dir: Path,
        growth_bytes: int = GROWTH_BYTES,
    ) -> None:
        self._growth_bytes = growth_bytes
        self._broker = broker
        self._seed = seed
        self._save_dir = save_dir
        host, _, port = broker.bootstrap.rpartition(":")
        self._address = (host, int(port))
        self._tree = ProcessTree(broker.pid)
        self._topic_id = TOPIC_ID
        self.played: dict[str, int] = {}

    def run(self, seconds: float, first: int = 0, count: int | None = None) -> int:
        """Play scenarios until the time is up; return how many.

        Raises:
            FuzzFailureError: something broke; the recent inputs are saved.
        """
        with wire.Connection(self._address) as connection:
            connection.create_topic(scenarios.TOPIC, config=KEEP)
            connection.create_topic(bystander.TOPIC, BYSTANDERS)
            self._topic_id = _topic_id(connection, scenarios.TOPIC)
        pids = self._broker.processes()
        witnesses = [bystander.Bystander(self._address, i) for i in range(BYSTANDERS)]
        attacker = Attacker(self._address)
        number = first
        baseline = 0
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline and number - first != count:
                self._play(attacker, number)
                number += 1
                if number - first in WARM_UPS:
                    baseline = self._tree.pss_bytes()
                if number % CHECK_EVERY == 0:
                    self._check_running(pids, witnesses)
            attacker.finish()
            self._check_running(pids, witnesses)
        except (BrokenPromiseError, OSError) as error:
            raise self._failure(number, repr(error)) from error
        finally:
            for witness in witnesses:
                witness.stop()
        try:
            self._check_running(pids, witnesses)
            self._check_afterwards(baseline)
        except (BrokenPromiseError, OSError, wire.AnswerError) as error:
            raise self._failure(number, repr(error)) from error
        return number - first

    def _play(self, attacker: Attacker, number: int) -> None:
        scenario = scenarios.scenario(self._seed, number)
        self.played[scenario.name] = self.played.get(scenario.name, 0) + 1
        chunks = [chunk.replace(TOPIC_ID, self._topic_id) for chunk in scenario.chunks]
        try:
            attacker.play(scenario._replace(chunks=chunks), number)
        except BrokenPromiseError as error:
            raise BrokenPromiseError(f"{scenario.name}: {error}") from error

    def _check_running(
        self, pids: dict[int, str], witnesses: list[bystander.Bystander]
    ) -> None:
        now = self._broker.processes()
        if pids.keys() - now.keys():  # cleaners may have come
            raise BrokenPromiseError(f"processes were {pids}, are {now}")
        for witness in witnesses:
            if witness.complaint:
                raise BrokenPromiseError(witness.complaint)
        if b"Traceback" in self._broker.log_path.read_bytes():
            raise BrokenPromiseError("the broker's log has a traceback")

    def _check_afterwards(self, baseline: int) -> None:
        """The log holds no lies, normal clients are served, memory went back."""
        with wire.Connection(self._address) as connection:
            stored = connection.read_all(scenarios.TOPIC, 0)
            end = connection.end_offset(scenarios.TOPIC, 0)
            if len(stored) != end:
                raise BrokenPromiseError(f"{len(stored)} records below offset {end}")
            batch = wire.record_batch([wire.RecordSpec(b"after all that")])
            produced = wire.parse_produce(
                connection.ask(wire.produce(scenarios.TOPIC, 0, batch))
            )
            if produced != (wire.ERROR_NONE, end):
                raise BrokenPromiseError(f"{produced} where offset {end} was due")
        if not baseline:
            return
        deadline = time.monotonic() + SETTLE_S
        while (grown := self._tree.pss_bytes() - baseline) > self._growth_bytes:
            if time.monotonic() > deadline:
                raise BrokenPromiseError(
                    f"the broker grew by {grown >> 20} MiB and stays so"
                )
            time.sleep(0.2)

    def _failure(self, number: int, what: str) -> FuzzFailureError:
        """Save what was sent of late, and say how to send it again."""
        self._save_dir.mkdir(parents=True, exist_ok=True)
        path = self._save_dir / f"fuzz-{self._seed}-{number}.json"
        recent = []
        for n in range(max(0, number - RECENT), number + 1):
            scenario = scenarios.scenario(self._seed, n)
            chunks = [chunk.hex() for chunk in scenario.chunks]
            recent.append({"number": n, "name": scenario.name, "chunks": chunks})
        path.write_text(json.dumps({"failure": what, "recent": recent}, indent=1))
        return FuzzFailureError(
            f"{what}\nscenario {number} of seed {self._seed}; recent input: {path}\n"
            f"again: python -m tests.fuzz --seed {self._seed} --first {number} "
            f"--count 1\nthe broker said:\n{self._broker.log_tail()}"
        )


def _topic_id(connection: wire.Connection, topic: str) -> bytes:
    """Return the id that the broker has given to a topic."""
    asked = MetadataRequest(topics=[MetadataRequestTopic(name=topic)])
    version = 12
    framed = wire.request((MetadataRequest.api_key, version), asked.encode(version))
    answer = MetadataResponse.decode(version, connection.ask(framed)[5:])
    return bytes(answer.topics[0].topic_id)
