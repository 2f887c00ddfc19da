"""What TLS costs: the same bytes over TLS and in the clear, of one broker in one run.

Both clients and the broker share the machine's cores, so rates say little: what is
compared is the CPU time of the listener's one processor, and a figure per CPU second
is what one core can carry.
"""

from __future__ import annotations

import ssl
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil
import trustme

from tests.bench import wire
from tests.bench.cases import Case, Context
from tests.support.broker import Broker

MIB: Final = 1 << 20
_TOPIC_CONFIG: Final = {"max.message.bytes": str(2 * MIB)}
_ANSWERS: Final = 64


class _Secured:
    """A broker with a listener in the clear and one with TLS."""

    def __init__(self, directory: Path) -> None:
        authority = trustme.CA()
        issued = authority.issue_cert("localhost", key_type=trustme.KeyType.ECDSA)
        path = directory / "server.pem"
        issued.private_key_and_cert_chain_pem.write_to_path(str(path))
        self.context = ssl.create_default_context()
        authority.configure_trust(self.context)
        self.broker = Broker(
            directory / "data",
            {
                "listeners": "PLAINTEXT://127.0.0.1:0,SSL://127.0.0.1:0",
                "num.network.threads": 1,
                "ssl.keystore.type": "PEM",
                "ssl.keystore.location": path,
            },
        )

    def connect(self, protocol: str) -> wire.Connection:
        host, _, port = self.broker.listeners[protocol].rpartition(":")
        connection = wire.Connection((host, int(port)))
        if protocol == "SSL":
            connection.use_tls(self.context)
        return connection

    def processor_cpu_s(self, protocol: str) -> float:
        """CPU time so far of the one processor of a listener."""
        total = 0.0
        for child in psutil.Process(self.broker.pid).children():
            title = " ".join(child.cmdline())
            if "network-thread" in title and f"ListenerName({protocol})" in title:
                times = child.cpu_times()
                total += times.user + times.system
        return total


def _per_cpu_s(
    secured: _Secured, protocol: str, seconds: float, work: Callable[[], int]
) -> float:
    """Do some work again and again; how much of it a CPU second carries."""
    work()
    done, before = 0, secured.processor_cpu_s(protocol)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done += work()
    return done / max(1e-9, secured.processor_cpu_s(protocol) - before)


def _bytes(context: Context) -> dict[str, float]:
    batch = wire.batch_of_size(MIB)
    figures = {}
    with tempfile.TemporaryDirectory() as directory:
        secured = _Secured(Path(directory))
        with secured.broker, secured.connect("PLAINTEXT") as admin:
            admin.create_topic("bench-tls", 1, _TOPIC_CONFIG)
            for _ in range(_ANSWERS):
                admin.ask(wire.produce("bench-tls", 0, batch))
            produce = wire.produce("bench-tls", 0, batch)
            fetch = wire.fetch("bench-tls", 0, 0, max_bytes=16 * MIB)
            for protocol, name in (("PLAINTEXT", "plain"), ("SSL", "tls")):
                with secured.connect(protocol) as connection:
                    for what, request in (("in", produce), ("out", fetch)):

                        def work(request: bytes = request) -> int:
                            return len(connection.ask(request)) + len(request)

                        figures[f"{name}_{what}_mb_per_cpu_s"] = (
                            _per_cpu_s(secured, protocol, context.seconds, work) / 1e6
                        )
    return figures


def _handshakes(context: Context) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        secured = _Secured(Path(directory))
        with secured.broker:

            def work() -> int:
                secured.connect("SSL").close()
                return 1

            rate = _per_cpu_s(secured, "SSL", context.seconds, work)
    return {"handshakes_per_cpu_s": rate}


CASES: Final = [
    Case("tls/bytes-1MiB", _bytes, starts_brokers=True),
    Case("tls/handshakes", _handshakes, starts_brokers=True),
]
