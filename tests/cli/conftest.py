import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpbroker.cli import main
from tests.client.fake_broker import FakeBroker


@pytest.fixture
def fake_broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBroker]:
    """A broker that the commands find by MPBROKER_BOOTSTRAP."""
    broker = FakeBroker({"t": 3, "one": 1})
    monkeypatch.setenv("MPBROKER_BOOTSTRAP", str(broker.address))
    yield broker
    broker.close()


class Result:
    """What a command left: exit code, stdout and stderr."""

    def __init__(self, code: int, out: bytes, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err


@pytest.fixture(scope="module", autouse=True)
def no_clients_of_others() -> None:
    """End clients of earlier modules that are parts of cycles, and so still live.

    librdkafka writes to this process's standard error that their brokers are gone, and
    a test would take that for what its command says.
    """
    gc.collect()


@pytest.fixture
def mpbroker(
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Callable[..., Result]:
    """Runs `mpbroker ARGUMENTS` in this process, with bytes for standard input."""

    def run(*arguments: object, stdin: bytes = b"") -> Result:
        path = tmp_path / "stdin"
        path.write_bytes(stdin)
        with path.open() as file:
            monkeypatch.setattr("sys.stdin", file)
            code = main([os.fsdecode(str(argument)) for argument in arguments])
        out, err = capfdbinary.readouterr()
        return Result(code, out, err.decode())

    return run
