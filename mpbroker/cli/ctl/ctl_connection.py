"""Find the broker for `mpbroker ctl`, and talk to its control socket."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from mpbroker.base.errors import MpbrokerError
from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.options import Seconds
from mpbroker.inspect.attach import FoundBroker, find_brokers
from mpbroker.inspect.control_protocol import (
    MAX_ANSWER_BYTES,
    SOCKET_NAME,
    FrameReader,
    encode_frame,
    socket_address,
)

# The variable that sets control.socket.path of a broker also tells ctl where to look.
SOCKET_VARIABLE: Final = "MPBROKER_CONTROL_SOCKET_PATH"
_READ_BYTES: Final = 256 * 1024
_POLL_S: Final = 0.05


class BrokerUnavailableError(CliError):
    """An error: no broker answers. The exit code is 69."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.UNAVAILABLE)


class ControlTimeoutError(BrokerUnavailableError):
    """An error: the control socket exists, but the supervisor does not answer."""


class Target(NamedTuple):
    """The broker that a `mpbroker ctl` command is for."""

    socket_path: str
    timeout_s: float
    found: FoundBroker | None  # None: it has no readable file in /dev/shm

    @property
    def pid(self) -> int:
        return self.found.pid if self.found is not None else 0

    def connect(self) -> ControlClient:
        """Connect to the broker's control socket.

        Raises:
            BrokerUnavailableError: no broker answers.
            CliError: this user may not connect.
        """
        return ControlClient(self.socket_path, self.timeout_s)

    def request(self, command: str, **arguments: Any) -> Any:
        """Connect, send one command, and return its result: see ControlClient."""
        with self.connect() as client:
            return client.request(command, **arguments)


class ControlClient:
    """A connection to a broker's control socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._reader = FrameReader(MAX_ANSWER_BYTES)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(timeout_s)
        try:
            with socket_address(path) as address:
                self._sock.connect(address)
        except PermissionError:
            self._sock.close()
            raise CliError(
                f"{path}: permission denied; be its owner, of its group, or root"
            ) from None
        except (BlockingIOError, TimeoutError):
            self._sock.close()
            raise self._silence() from None
        except (OSError, MpbrokerError) as error:
            self._sock.close()
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise BrokerUnavailableError(
                f"no broker answers at {path}: {reason}"
            ) from None

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def request(self, command: str, **arguments: Any) -> Any:
        """Send a command and return its result.

        Raises:
            CliError: the broker refused the command; the text is its reason.
            ControlTimeoutError: the broker did not answer in time.
            BrokerUnavailableError: the broker closed the connection.
        """
        # An OSError is ignored: the broker may have refused before it read the command,
        # and its refusal can still be read.
        try:
            self._sock.sendall(
                encode_frame({"command": command, "arguments": arguments})
            )
        except TimeoutError:
            raise self._silence() from None
        except OSError:
            pass
        answer = self._receive()
        if not answer.get("ok"):
            raise CliError(str(answer.get("error")))
        return answer.get("result")

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout_s
        while True:
            answer = self._reader.next_map()
            if answer is not None:
                return answer
            try:
                self._sock.settimeout(max(0.001, deadline - time.monotonic()))
                data = self._sock.recv(_READ_BYTES)
            except TimeoutError:
                raise self._silence() from None
            except OSError as error:
                raise BrokerUnavailableError(
                    f"the connection to the broker broke: {error.strerror}"
                ) from None
            if not data:
                raise BrokerUnavailableError("the broker closed the connection")
            self._reader.feed(data)

    def _silence(self) -> ControlTimeoutError:
        return ControlTimeoutError(
            f"the supervisor does not answer within {self._timeout_s:g} s"
        )


# -- which broker ----------------------------------------------------------------------


def find_target(
    socket_path: Path | None, data_dir: Path | None, timeout_s: float
) -> Target:
    """Return the broker that the options name, or the only one that runs here.

    Raises:
        CliError: with exit code 69 if no broker runs, and 2 if several do.
    """
    brokers = find_brokers()
    if socket_path is not None:
        path = os.path.abspath(socket_path)
        matching = [each for each in brokers if _socket_of(each) == path]
        return Target(path, timeout_s, matching[0] if matching else None)
    if data_dir is not None:
        return _by_data_dir(brokers, os.path.abspath(data_dir), timeout_s)
    alive = [each for each in brokers if each.alive]
    if len(alive) > 1:
        raise CliError(
            f"{len(alive)} brokers run here; name one with --data-dir or --socket:\n"
            + "\n".join(_describe(each) for each in alive),
            ExitCode.USAGE,
        )
    # A dead broker is a target, too: its file in /dev/shm tells why it died.
    for broker in alive or brokers[-1:]:
        own_path = _socket_of(broker)
        if own_path:
            return Target(own_path, timeout_s, broker)
        if broker.state is None:
            raise CliError(
                f"a broker runs here as process {broker.pid}, but this user may not"
                " read its shared memory; be its user, of its group, or root"
            )
        raise BrokerUnavailableError(
            f"the broker of process {broker.pid} has no control socket; its log says"
            " why"
        )
    raise BrokerUnavailableError(
        "/dev/shm shows no broker that runs on this machine; if it is in a container,"
        " name it with --data-dir or --socket"
    )


def _by_data_dir(
    brokers: list[FoundBroker], directory: str, timeout_s: float
) -> Target:
    for broker in brokers:
        own_path = _socket_of(broker)
        if own_path and (
            broker.serves(directory) or broker.serves(os.path.realpath(directory))
        ):
            return Target(own_path, timeout_s, broker)
    path = os.path.join(directory, SOCKET_NAME)
    if not os.path.lexists(path):
        raise BrokerUnavailableError(f"no broker serves {directory}: it has no {path}")
    return Target(path, timeout_s, None)


def _socket_of(broker: FoundBroker) -> str | None:
    path = (broker.state or {}).get("control_socket")
    return path if isinstance(path, str) else None


def _describe(broker: FoundBroker) -> str:
    state = broker.state or {}
    where = ", ".join(state.get("log_dirs", ())) or "of another user"
    return f"  process {broker.pid}: {where}"


def target_options(run: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that name a broker to a command, and pass it a ``target``."""

    @click.option(
        "-d",
        "--data-dir",
        type=click.Path(path_type=Path, readable=False),
        help="The broker that serves this directory (log.dirs).",
    )
    @click.option(
        "-s",
        "--socket",
        "socket_path",
        type=click.Path(path_type=Path, readable=False),
        default=lambda: os.environ.get(SOCKET_VARIABLE) or None,
        show_default=SOCKET_VARIABLE,
        help="The broker that answers at this socket (control.socket.path).",
    )
    @click.option(
        "--timeout",
        "timeout_s",
        type=Seconds(min=0.1, max=86400),
        default=5.0,
        show_default=True,
        help="Seconds to wait for an answer.",
    )
    @wraps(run)
    def with_target(
        *arguments: Any,
        data_dir: Path | None,
        socket_path: Path | None,
        timeout_s: float,
        **options: Any,
    ) -> Any:
        # --data-dir overrides the variable, which may be set for another broker.
        if data_dir is not None:
            socket_path = None
        target = find_target(socket_path, data_dir, timeout_s)
        return run(*arguments, target=target, **options)

    return with_target


def wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll a condition until it is true; return False if the timeout passes first."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
