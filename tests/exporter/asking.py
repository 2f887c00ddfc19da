"""Ask a broker's exporter over HTTP."""

from __future__ import annotations

import urllib.error
import urllib.request

from mpbroker.ipc.named_segment import read_telemetry, start_time
from tests.support.broker import Broker
from tests.support.patience import LONGEST_S

METRICS = {"metrics.listeners": "HTTP://127.0.0.1:0"}


def told(broker: Broker) -> dict[str, object]:
    """What the supervisor publishes of itself."""
    found = read_telemetry(f"/mpbroker-{broker.pid}-{start_time(broker.pid)}")
    assert found is not None
    return found


def url_of(broker: Broker) -> str:
    return str(told(broker)["metrics"])


def pids_of(broker: Broker, *roles: str) -> list[int]:
    """The processes of some roles."""
    return [c["pid"] for c in told(broker)["children"] if c["role"] in roles]


def get(broker: Broker, path: str = "metrics") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url_of(broker) + path, timeout=LONGEST_S) as page:
            return page.status, page.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def samples(text: str) -> dict[str, float]:
    """Values by name and labels, as they are written."""
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
