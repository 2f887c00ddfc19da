"""ControlServer: the Unix socket of ``mpbroker ctl``, in the supervisor's loop.

The supervisor must never wait for a client. Sockets do not block. A client has at most
one request and one answer in memory here. Its next request is read when its answer has
been sent. A client that sends half a request, or nothing, is disconnected after a
while. A failure ends one session and nothing else.

The socket's file has the mode 0660. In addition the kernel is asked for the peer's user
and groups: a file's mode is easily changed, and another user may own a directory above.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.logger import get_logger
from mpbroker.inspect.control_protocol import (
    MAX_REQUEST_BYTES,
    ControlProtocolError,
    ControlSocketError,
    FrameReader,
    encode_frame,
    may_control,
    peer_of,
    socket_address,
)

_LOG = get_logger(__name__)

_MODE: Final = 0o660
_BACKLOG: Final = 16
MAX_SESSIONS: Final = 32
_READ_BYTES: Final = 64 * 1024
_IDLE_S: Final = 60.0
_HALF_A_REQUEST_S: Final = 5.0
_UNREAD_ANSWER_S: Final = 10.0
_LOOK_S: Final = 1.0
_PROBE_S: Final = 0.5

Execute = Callable[[str, dict[str, Any]], Any]


class Loop(Protocol):
    """An event loop that reports what happens to descriptors, with timers."""

    only_ours: set[int]

    def watch(self, fd: int, events: int, ready: Callable[[int], None]) -> None: ...

    def unwatch(self, fd: int) -> None: ...

    def every(self, interval_s: float, run: Callable[[], None]) -> None: ...


class ControlServer:
    """Serves the requests of several clients, one after another.

    Args:
        loop: calls back when a socket is ready, and once a second.
        path: the path of the socket's file.
        execute: carries out a command. It must not block. A MpbrokerError becomes the
            answer; any other error is logged, too.
    """

    def __init__(self, loop: Loop, path: str, execute: Execute) -> None:
        self.path = path
        self._loop = loop
        self._execute = execute
        self._sessions: dict[int, _Session] = {}
        self._looks_away = False
        self._listener, found = _listen(path)
        self._file = (found.st_dev, found.st_ino)
        self._group = found.st_gid
        # A child with a copy of a session's socket would keep it open after close().
        loop.only_ours.add(self._listener.fileno())
        loop.watch(self._listener.fileno(), select.EPOLLIN, self._accept)
        loop.every(_LOOK_S, self._close_the_silent)

    def close(self) -> None:
        """Disconnect all clients; remove the socket's file, if it is this broker's."""
        for session in list(self._sessions.values()):
            self._close(session)
        self._loop.only_ours.discard(self._listener.fileno())
        if not self._looks_away:
            self._loop.unwatch(self._listener.fileno())
        self._listener.close()
        try:
            found = os.stat(self.path)
            if (found.st_dev, found.st_ino) == self._file:
                os.unlink(self.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            _LOG.warning("%s cannot be removed: %s", self.path, error.strerror)

    def _accept(self, events: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return  # the client has disconnected
        except OSError as error:
            # Out of descriptors: epoll would report the waiting client again and again,
            # so the listener is not watched for a second.
            _LOG.warning("control socket: cannot accept: %s", error.strerror)
            self._loop.unwatch(self._listener.fileno())
            self._looks_away = True
            return
        sock.setblocking(False)
        session = _Session(sock)
        try:
            peer = peer_of(sock)
        except OSError:
            sock.close()
            return
        self._sessions[session.fd] = session
        self._loop.only_ours.add(session.fd)
        if not may_control(peer, os.geteuid(), self._group):
            _LOG.warning(
                "control socket: process %d of user %d was refused", peer.pid, peer.uid
            )
            self._refuse(session, f"user {peer.uid} may not control this broker")
        elif len(self._sessions) > MAX_SESSIONS:
            self._refuse(session, f"{MAX_SESSIONS} others are connected; try again")
        else:
            self._watch(session, select.EPOLLIN)

    def _watch(self, session: _Session, events: int) -> None:
        session.watched = True
        self._loop.watch(session.fd, events, lambda found: self._ready(session, found))

    def _ready(self, session: _Session, events: int) -> None:
        """Carry out one step of a session: send, receive, or execute a request.

        Other clients and the repair of deaths wait meanwhile.
        """
        try:
            if session.unsent:
                session.send()
            elif not session.reader.has_frame and not session.receive():
                self._close(session)
                return
            if not session.unsent:
                request = session.reader.next_map()
                if request is not None:
                    if session.has_given_up():
                        self._close(session)
                        return
                    self._answer(session, request)
            # A socket is writable at once, so a buffered request is served next turn.
            more = session.unsent or session.reader.has_frame
            self._watch(session, select.EPOLLOUT if more else select.EPOLLIN)
        except ControlProtocolError as error:
            self._refuse(session, str(error))
        except OSError:
            self._close(session)
        except Exception:  # noqa: BLE001 - the loop goes on
            # No bytes that a client sends may end the broker.
            _LOG.exception("control socket: a session failed; this is a bug")
            self._close(session)

    def _answer(self, session: _Session, request: dict[str, Any]) -> None:
        name, arguments = request.get("command"), request.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ControlProtocolError("a request is {command: text, arguments: map}")
        try:
            answer = {"ok": True, "result": self._execute(name, arguments)}
        except MpbrokerError as error:
            answer = {"ok": False, "error": str(error)}
        except Exception as error:  # noqa: BLE001 - the loop goes on
            _LOG.exception("control socket: %s failed; this is a bug", name)
            answer = {"ok": False, "error": f"{name} failed: {error!r}; see the log"}
        session.unsent = memoryview(encode_frame(answer))
        session.send()

    def _refuse(self, session: _Session, reason: str) -> None:
        """Send a client the reason of a refusal, if that does not block; disconnect."""
        session.unsent = memoryview(encode_frame({"ok": False, "error": reason}))
        try:
            session.send()
        except OSError:
            pass
        self._close(session)

    def _close(self, session: _Session) -> None:
        if session.closed:
            return
        if session.watched:
            self._loop.unwatch(session.fd)
        self._loop.only_ours.discard(session.fd)
        del self._sessions[session.fd]
        session.closed = True
        session.sock.close()

    def _close_the_silent(self) -> None:
        if self._looks_away:
            self._looks_away = False
            self._loop.watch(self._listener.fileno(), select.EPOLLIN, self._accept)
        now = time.monotonic()
        for session in list(self._sessions.values()):
            if now - session.active > session.patience_s:
                self._close(session)


class _Session:
    """One client's connection to the control socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.reader = FrameReader(MAX_REQUEST_BYTES)
        self.unsent = memoryview(b"")
        self.watched = False
        self.closed = False
        self.active = time.monotonic()

    @property
    def patience_s(self) -> float:
        if self.unsent:
            return _UNREAD_ANSWER_S
        return _IDLE_S if self.reader.is_empty else _HALF_A_REQUEST_S

    def receive(self) -> bool:
        """Receive what the client has sent; return False if it has disconnected."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        # Not for every byte: one a second would keep half a request here for ever.
        if self.reader.is_empty:
            self.active = time.monotonic()
        self.reader.feed(data)
        return bool(data)

    def has_given_up(self) -> bool:
        """Whether the client has disconnected, so that its request is void.

        A supervisor that was stopped finds old requests when it is continued.
        """
        try:
            return not self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False

    def send(self) -> None:
        """Send the client as much of its answer as the socket takes now."""
        try:
            sent = self.sock.send(self.unsent, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        if sent:
            self.active = time.monotonic()
            self.unsent = self.unsent[sent:]


def _listen(path: str) -> tuple[socket.socket, os.stat_result]:
    """Make the control socket; replace a dead broker's, but not a living one's.

    Returns:
        The socket, and the status of its file.

    Raises:
        ControlSocketError: a living broker's socket, or another file, is there; or the
            socket cannot be made.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with socket_address(path) as address:
            _remove_leftover(path, address)
            # By umask and not by chmod afterwards: at no time may other users connect.
            before = os.umask(0o777 & ~_MODE)
            try:
                sock.bind(address)
            finally:
                os.umask(before)
            sock.listen(_BACKLOG)
            return sock, os.stat(address)
    except OSError as error:
        sock.close()
        raise ControlSocketError(
            f"control.socket.path={path}: cannot listen there: {error.strerror}; name"
            " another place, on a file system that takes sockets"
        ) from error
    except BaseException:
        sock.close()
        raise


def _remove_leftover(path: str, address: str) -> None:
    try:
        found = os.lstat(address)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ControlSocketError(
            f"control.socket.path={path}: the file there is not a socket;"
            " remove it, or name another place"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(address)
        except ConnectionRefusedError:
            os.unlink(address)  # no process has it open
            return
        except FileNotFoundError:
            return
        except (BlockingIOError, TimeoutError):
            pass  # its backlog is full: a living process has it
        else:
            pid = peer_of(probe).pid
            raise ControlSocketError(
                f"control.socket.path={path} is in use by process {pid}; stop that"
                " broker, or name another place"
            )
    raise ControlSocketError(
        f"control.socket.path={path} is in use by a process that does not answer; stop"
        " that broker, or name another place"
    )
