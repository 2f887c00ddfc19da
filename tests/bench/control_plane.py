"""Metadata on the control plane, while the data plane's ring is full."""

from __future__ import annotations

import contextlib
import time
from typing import Final

from mpbroker.cli.ctl.ctl_connection import ControlClient
from tests.bench import wire
from tests.bench.brokers import scratch_directory
from tests.bench.cases import Case, Context
from tests.support.broker import Broker

DATA_RING: Final = 8
CONNECTIONS: Final = 64
SLOW_MS: Final = 60_000  # longer than the measurement: nothing leaves the ring
CONFIG: Final[dict[str, object]] = {
    "listeners": "DATA://127.0.0.1:0,CONTROL://127.0.0.1:0",
    "listener.security.protocol.map": "DATA:PLAINTEXT,CONTROL:PLAINTEXT",
    "control.plane.listener.name": "CONTROL",
    "queued.max.requests": DATA_RING,
    "num.io.threads": 2,
    "control.inject.enable": "true",
}


def _metadata(context: Context) -> dict[str, float]:
    with (
        scratch_directory() as directory,
        Broker(directory / "data", CONFIG) as broker,
        contextlib.ExitStack() as stack,
    ):
        control = stack.enter_context(_connect(broker, "CONTROL"))
        control.ask(wire.metadata(None))
        with ControlClient(str(broker.data_dir / "control.sock"), 30) as client:
            # The control plane's handler has the id after theirs.
            for number in (0, 1):
                client.request(
                    "inject", fault="slow", role="handler", id=number, value=SLOW_MS
                )
        for _ in range(CONNECTIONS):
            data = stack.enter_context(_connect(broker, "DATA"))
            data.send(wire.metadata(None))
        with ControlClient(str(broker.data_dir / "control.sock"), 30) as client:
            while client.request("status")["ring_waiting"] < DATA_RING:
                time.sleep(0.01)
        times = []
        until = time.monotonic() + context.seconds
        while (began := time.monotonic()) < until:
            control.ask(wire.metadata(None))
            times.append(time.monotonic() - began)
    times.sort()
    return {
        "p50_ms": times[len(times) // 2] * 1e3,
        "p99_ms": times[int(len(times) * 0.99)] * 1e3,
    }


def _connect(broker: Broker, listener: str) -> wire.Connection:
    host, _, port = broker.listeners[listener].rpartition(":")
    return wire.Connection((host, int(port)))


CASES: Final = [Case("control-plane/full-ring", _metadata, starts_brokers=True)]
