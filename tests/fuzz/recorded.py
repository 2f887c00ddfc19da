"""A run with bent requests of real clients, and what must hold in and after it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from mpbroker.inspect.process_state import process_state
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.delete_topics import (
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicState,
)
from mpbroker.protocol.messages.metadata import MetadataRequest, MetadataResponse
from tests.bench import wire
from tests.bench.processes import ProcessTree, title_of
from tests.chaos.company import Company
from tests.fuzz import bystander
from tests.fuzz.assault import PASSWORD, USER, Assault
from tests.fuzz.attack import GLANCE_S, BrokenPromiseError
from tests.fuzz.bent import Stream, volley
from tests.fuzz.campaign import GROWTH_BYTES, SETTLE_S, FuzzFailureError
from tests.fuzz.minimise import minimise
from tests.fuzz.recorder import Corpus
from tests.neighbours.clients import LONGEST_WAIT_S
from tests.support.broker import Broker, BrokerFailedError

BYSTANDERS: Final = 2
PARTITIONS: Final = 3
# Topics that volleys have made are deleted, and those of the corpus made again.
TIDY_EVERY: Final = 200
# Volleys after which memory is looked at, the last time for good: until then processes
# grow by what they load and remember once.
WARM_UPS: Final = (200, 1000, 4000)
# What a failure may need; older input has seldom to do with it.
RECENT: Final = 100
# A request is executed, and a death seen, within this time.
_PATIENCE_S: Final = 0.3
_TOLD_BYTES: Final = 4000  # of a traceback

_JAAS: Final = (
    "org.apache.kafka.common.security.plain.PlainLoginModule required"
    f' user_{USER}="{PASSWORD}";'
)
# The one of RFC 7517, appendix A.1, in whose name no recorded token is signed.
_SOME_KEY: Final = {
    "kty": "EC",
    "crv": "P-256",
    "x": "MKBCTNIcKUSDii11ySs3526iDZ8AiTo7Tu6KPAqv7D4",
    "y": "4Etl6SRW2YiLUrN5vfvVHuhp7x8PxltmWWlbbM4IFyM",
    "use": "sig",
    "kid": "one",
}
CONFIG: Final[dict[str, object]] = {
    "listeners": "PLAINTEXT://127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:0",
    "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
    "listener.name.sasl_plaintext.plain.sasl.jaas.config": _JAAS,
    # So that there are ACLs to be made and deleted, none of which stops the bystanders.
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": f"User:ANONYMOUS;User:{USER}",
    "group.initial.rebalance.delay.ms": 0,
    "group.min.session.timeout.ms": 500,  # recorded members live that short
    "offsets.topic.num.partitions": 2,
    "transaction.state.log.num.partitions": 2,
}


class Target:
    """A broker under assault, and what is known of it."""

    def __init__(
        self, broker: Broker, corpus: Corpus, glance_s: float = GLANCE_S
    ) -> None:
        self.broker = broker
        self._corpus = corpus
        beside = broker.data_dir.parent
        keys = beside / "jwks.json"
        keys.write_text(json.dumps({"keys": [_SOME_KEY]}))
        broker.config["sasl.oauthbearer.jwks.endpoint.url"] = f"file://{keys}"
        broker.config["client.telemetry.log.path"] = beside / "telemetry.log"
        broker.start()
        self.address = _address(broker.bootstrap)
        self.assault = Assault(broker.listeners, corpus, glance_s)
        self._connection = wire.Connection(self.address)
        self._connection.create_topic(bystander.TOPIC, BYSTANDERS)
        self.tidy()
        self.tree = ProcessTree(broker.pid)
        self._titles = {pid: title_of(pid) for pid in broker.processes()}
        self._read_to = 0

    def tidy(self) -> None:
        """Delete the topics that volleys have made; make those of the corpus."""
        wanted = self._corpus.topics
        kept = {bystander.TOPIC, *wanted}
        request = DeleteTopicsRequest(
            topics=[
                DeleteTopicState(name=name)
                for name in self._topics()
                if name not in kept and not name.startswith(("__", "transactions-"))
            ],
            timeout_ms=30_000,
        )
        self._ask(request, DeleteTopicsResponse, 6)
        for name in wanted:
            self._connection.create_topic(name, PARTITIONS)
        there = self._topics()
        self.assault.topic_ids = {
            stand_in: there[name] for name, stand_in in wanted.items() if name in there
        }

    def _topics(self) -> dict[str, bytes]:
        answer = self._ask(MetadataRequest(topics=None), MetadataResponse, 12)
        return {str(topic.name): bytes(topic.topic_id) for topic in answer.topics}

    def _ask(self, message: Message, kind: Any, version: int) -> Any:
        framed = wire.request((message.api_key, version), message.encode(version))
        return kind.decode(version, self._connection.ask(framed)[5:])

    def check(self) -> None:
        """See whether all processes are alive.

        Raises:
            BrokenPromiseError: one is not.
        """
        for pid, title in self._titles.items():
            if process_state(pid) in ("Z", ""):
                raise BrokenPromiseError(f"{title} has died")

    def check_log(self) -> None:
        """See whether the broker has complained of itself.

        Raises:
            BrokenPromiseError: it has.
        """
        with self.broker.log_path.open("rb") as log:
            log.seek(self._read_to)
            said = log.read()
        self._read_to += len(said)
        if (at := said.find(b"Traceback")) >= 0:
            told = said[at : at + _TOLD_BYTES].decode(errors="replace")
            raise BrokenPromiseError(f"the broker's log has a traceback:\n{told}")

    def close(self) -> None:
        self._connection.close()


class RecordedCampaign:
    """One run.

    Attributes:
        requests: how many were sent.
        served: the APIs of which a request was answered without an error.

    Args:
        make_broker: makes a broker with the settings that it is given.
        corpus: what volleys are made of.
        seed: of all volleys.
        save_dir: for the input of a failure.
        kind: what the command line calls it.
        growth_bytes: how much larger the broker may be afterwards.
    """

    def __init__(
        self,
        make_broker: Callable[[dict[str, object]], Broker],
        corpus: Corpus,
        seed: int,
        save_dir: Path,
        kind: str = "recorded",
        growth_bytes: int = GROWTH_BYTES,
    ) -> None:
        self._kind = kind
        self._make_broker = make_broker
        self._corpus = corpus
        self._seed = seed
        self._save_dir = save_dir
        self._growth_bytes = growth_bytes
        self.requests = 0
        self.served: set[ApiKey] = set()

    def run(self, seconds: float, first: int = 0, count: int | None = None) -> int:
        """Play volleys until the time is up; return how many.

        Raises:
            FuzzFailureError: something broke; its input was made small, and saved.
        """
        target = Target(self._make_broker(CONFIG), self._corpus)
        number = first
        try:
            for number in self._play(target, seconds, first, count):
                pass
            target.close()
            target.broker.stop()
        except (BrokenPromiseError, OSError, wire.AnswerError) as error:
            said = target.broker.log_tail()
            target.close()
            with contextlib.suppress(BrokerFailedError):
                target.broker.stop()
            raise self._failure(first, number, str(error), said) from error
        return number - first

    def _play(
        self, target: Target, seconds: float, first: int, count: int | None
    ) -> Iterator[int]:
        """Play volleys; yield the number of each before it is played."""
        company = Company(target.broker.bootstrap, f"fuzz-{self._seed}")
        witnesses = [
            bystander.Bystander(target.address, i, LONGEST_WAIT_S)
            for i in range(BYSTANDERS)
        ]
        number = first
        baseline = 0
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline and number - first != count:
                yield number
                streams = volley(self._corpus, self._seed, number)
                target.assault.play(streams, reset=bool(number % 2))
                self.requests += len(target.assault.sent)
                target.assault.sent.clear()
                self.served = target.assault.served
                number += 1
                target.check()
                target.check_log()
                _hear(witnesses)
                if number % TIDY_EVERY == 0:
                    target.tidy()
                if number - first in WARM_UPS:
                    baseline = target.tree.pss_bytes()
            yield number
        finally:
            for witness in witnesses:
                witness.stop()
            with contextlib.closing(company):
                told = company.end()
        _hear(witnesses)
        if wrong := [*told.wrong, *told.stuck, *told.errors]:
            raise BrokenPromiseError(f"groups and transactions: {wrong}")
        target.check()
        target.check_log()
        target.tidy()
        if baseline:
            self._check_growth(target.tree, baseline)

    def _check_growth(self, tree: ProcessTree, baseline: int) -> None:
        deadline = time.monotonic() + SETTLE_S
        while (grown := tree.pss_bytes() - baseline) > self._growth_bytes:
            if time.monotonic() > deadline:
                raise BrokenPromiseError(
                    f"the broker grew by {grown >> 20} MiB and stays so"
                )
            time.sleep(0.2)

    # -- a failure -------------------------------------------------------------------

    def _failure(
        self, first: int, number: int, what: str, said: str
    ) -> FuzzFailureError:
        """Make the input small, save it, and say how to send it again."""
        begin = max(first, number - RECENT)
        recent = [volley(self._corpus, self._seed, n) for n in range(begin, number + 1)]
        trial = _Trial(self._make_broker, self._corpus)
        small = minimise(recent, trial.fails)
        self._save_dir.mkdir(parents=True, exist_ok=True)
        path = self._save_dir / f"bent-{self._seed}-{number}.json"
        sent = [data.hex() for data in trial.sent]
        path.write_text(json.dumps({"failure": what, "smallest": sent}, indent=1))
        found = (
            f"the smallest input that does it again, {len(sent)} requests: {path}\n"
            + "\n".join(text[:400] for text in sent[:10])
            if small
            else f"the last {len(recent)} volleys alone do not do it again"
        )
        return FuzzFailureError(
            f"{what}\nvolley {number} of seed {self._seed}; {found}\nagain: python -m"
            f" tests.fuzz --only {self._kind} --seed {self._seed} --first {begin}"
            f" --count {number + 1 - begin}\nthe broker said:\n{said}"
        )


class _Trial:
    """Plays an input against a broker of its own, again and again.

    Attributes:
        sent: the bytes of the last input that failed.
    """

    def __init__(
        self, make_broker: Callable[[dict[str, object]], Broker], corpus: Corpus
    ) -> None:
        self.sent: list[bytes] = []
        self._make_broker = make_broker
        self._corpus = corpus

    def fails(self, volleys: list[list[Stream]]) -> bool:
        """Return whether an input breaks something, whatever that is."""
        broker = self._make_broker(CONFIG)
        sent: list[bytes] = []
        try:
            with contextlib.ExitStack() as stack:
                target = Target(broker, self._corpus, _PATIENCE_S)
                stack.callback(target.close)
                sent = target.assault.sent
                witness = bystander.Bystander(target.address, 0, LONGEST_WAIT_S)
                stack.callback(witness.stop)
                for number, streams in enumerate(volleys):
                    target.assault.play(streams, reset=bool(number % 2))
                time.sleep(_PATIENCE_S)
                target.check()
                target.check_log()
                witness.stop()
                _hear([witness])
        except (BrokenPromiseError, OSError, wire.AnswerError):
            self.sent = sent
            return True
        finally:
            with contextlib.suppress(BrokerFailedError):
                broker.close()
        return False


def _hear(witnesses: list[bystander.Bystander]) -> None:
    for witness in witnesses:
        if witness.complaint:
            raise BrokenPromiseError(witness.complaint)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)
