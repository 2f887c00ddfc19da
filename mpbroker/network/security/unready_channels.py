"""UnreadyChannels: authenticate new connections, by TLS and then by SASL.

A connection is unready until then. Its bytes are not in shared memory, and its requests
are not published, because no other process could continue it. A frame is read exactly,
never ahead. So bytes behind the last token are still in the kernel when the connection
is admitted. From then on the connection's row and the kernel's counters agree.

    events ─▶ handshake ─▶ frame ─▶ authenticator ─▶ answer ─▶ ... ─▶ admitted
                 │                       │
                 └── close               └── wait (failure delay), answer, close

Source: Kafka KafkaChannel.prepare, Selector.pollSelectionKeys; KIP-306.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Final, Protocol

from mpbroker.base.logger import get_logger
from mpbroker.ipc.counters.authentication_counts import (
    AuthenticationCounts,
    AuthenticationResult,
)
from mpbroker.ipc.layout import ProcessorCounter
from mpbroker.ipc.tables.principals import PrincipalsFullError
from mpbroker.network.channel import Channel
from mpbroker.network.channel_selector import CLOSED, ChannelSelector
from mpbroker.network.errors import FrameLengthError
from mpbroker.network.fair_queue import FairQueue
from mpbroker.network.frame_length import explain_bad_length, explain_no_tls
from mpbroker.network.security.listener_authentication import ListenerSecurity, wall_ms
from mpbroker.network.security.sasl.authenticator import (
    AuthenticatorState,
    SaslServerAuthenticator,
    Session,
)
from mpbroker.network.security.sasl.mechanism import NotYetError, SaslError

_LOG = get_logger(__name__)
R = AuthenticationResult

_SIZE_BYTES: Final = 4
_CHUNK_BYTES: Final = (
    16 * 1024
)  # memory is allocated for bytes that came, not for the length that was sent
_TLS_HANDSHAKE: Final = b"\x16"  # content type of the first record of every client
_PEEKED: Final = 5
_RETRY_NS: Final = 50_000_000
_GRAIN_NS: Final = 20_000_000
_NEVER: Final = 1 << 62
# How long the process authenticates clients before it serves others. One step takes up
# to some milliseconds, as to read and judge a token of 512 KiB.
_LONGEST_NS: Final = 10_000_000
USER: Final = "User:"

Closed = Callable[[Channel, ProcessorCounter], None]


class Admitted(Protocol):
    """A function that lets a connection send requests, after its authentication.

    ``streams`` counts the bytes that were received and sent so far, without TLS.
    """

    def __call__(
        self, channel: Channel, user: str, session: Session | None, streams: Streams
    ) -> None: ...


class Streams:
    """Counts the bytes that a connection has received and sent since its beginning."""

    __slots__ = ("received", "sent")

    def __init__(self) -> None:
        self.received = 0
        self.sent = 0


class _Unready:
    """Holds the state of one connection that has not authenticated yet."""

    __slots__ = (
        "answer",
        "authenticator",
        "buffer",
        "channel",
        "close_ns",
        "deadline_ns",
        "frame_bytes",
        "has_handshake",
        "is_ready",
        "retry_ns",
        "security",
        "streams",
        "user",
    )

    def __init__(self, channel: Channel, deadline_ns: int) -> None:
        self.channel = channel
        self.deadline_ns = deadline_ns
        self.is_ready = False  # it is in the queue of those that can go on
        self.has_handshake = False  # the TLS handshake is done, or there is no TLS
        self.security: ListenerSecurity | None = None  # used for the handshake
        self.authenticator: SaslServerAuthenticator | None = None
        self.user = ""  # from its certificate
        self.buffer = bytearray()  # the frame that is being read
        self.frame_bytes = 0  # its length, size field included; 0: not known yet
        self.answer = memoryview(b"")  # still to be sent
        self.close_ns = 0  # if it has failed: when to answer and close it
        self.retry_ns = 0  # if its token could not be judged: when to try again
        self.streams = Streams()


class UnreadyChannels:
    """Authenticates new connections, and then admits or closes them.

    That costs more than most requests do, and a client may begin it on thousands of
    connections. So clients take turns, and those that have authenticated are served in
    between.

    Args:
        security: the listener's security.
        selector: receives and sends.
        counts: counts the results of authentications.
        words: the words of the control segment, which have the clients' addresses.
        name: returns a connection's printable name.
        admitted: called with a connection that has authenticated.
        closed: called with a connection that must be closed, and the reason.
    """

    def __init__(
        self,
        security: ListenerSecurity,
        selector: ChannelSelector,
        counts: AuthenticationCounts,
        words: memoryview,
        name: Callable[[int], str],
        admitted: Admitted,
        closed: Closed,
    ) -> None:
        self._security = security
        self._selector = selector
        self._counts = counts
        self._name = name
        self._admitted = admitted
        self._closed = closed
        self._by_fd: dict[int, _Unready] = {}
        self._ready = FairQueue(words)  # some may be closed by now
        self._next_ns = _NEVER  # nothing is due before then
        self._chunk = memoryview(bytearray(_CHUNK_BYTES))

    def __len__(self) -> int:
        return len(self._by_fd)

    @property
    def next_ns(self) -> int:
        """The earliest time at which ``tick`` has something to do, monotonic."""
        return self._next_ns if self._by_fd else _NEVER

    @property
    def can_go_on(self) -> bool:
        """Whether ``go_on`` has more to do now."""
        return bool(self._ready)

    def note_event(self, channel: Channel, *, has_ended: bool) -> None:
        """Let a connection go on that has an event of its socket.

        Args:
            channel: the connection.
            has_ended: whether the event says that the client has hung up.
        """
        unready = self._by_fd[channel.fd]
        channel.readable = True
        if has_ended:
            channel.closing = True
        if not unready.is_ready:
            unready.is_ready = True
            self._ready.append(channel)

    def go_on(self, now_ns: int) -> None:
        """Go on with connections that had events, client by client, for some 10 ms."""
        began = time.monotonic_ns()
        while self._ready:
            channel = self._ready.popleft()
            unready = self._by_fd.get(channel.fd)
            if unready is not None and unready.channel is channel:
                unready.is_ready = False
                self._proceed(unready, now_ns)
            if time.monotonic_ns() - began > _LONGEST_NS:
                return

    def use(self, security: ListenerSecurity) -> None:
        """Use new settings of TLS and SASL for connections from now on.

        A TLS handshake or an authentication that has begun goes on with the old ones.
        """
        self._security = security

    def begin(self, channel: Channel, now_ns: int) -> None:
        """Add a new connection. Its timeout begins now, even if it sends no bytes."""
        unready = _Unready(channel, now_ns + self._security.setup_timeout_ns)
        unready.has_handshake = not self._security.has_tls
        self._by_fd[channel.fd] = unready
        self._due(unready.deadline_ns)

    def tick(self, now_ns: int) -> None:
        """Close connections whose time is over; retry those that had to wait.

        The time is connections.setup.timeout.ms, or the delay after a failure.
        """
        if now_ns < self._next_ns:
            return
        self._next_ns = _NEVER
        for unready in list(self._by_fd.values()):
            if unready.close_ns:
                if now_ns >= unready.close_ns:
                    self._send(unready)  # as much as the socket takes
                    self._close(unready, ProcessorCounter.CLOSED_ERROR)
                else:
                    self._due(unready.close_ns)
                continue
            if now_ns >= unready.deadline_ns:
                step = "authenticate" if unready.has_handshake else "agree upon TLS"
                self._fail(unready, R.TIMEOUT, f"it took too long to {step}")
                continue
            self._due(unready.deadline_ns)
            if unready.retry_ns:
                if now_ns >= unready.retry_ns:
                    unready.retry_ns = 0
                    self._proceed(unready, now_ns)
                else:
                    self._due(unready.retry_ns)

    def close_all(self) -> None:
        """Close all connections that have not authenticated.

        No other process could continue them.
        """
        for unready in list(self._by_fd.values()):
            self._close(unready, ProcessorCounter.CLOSED_BY_HANDLER)

    def _due(self, at_ns: int) -> None:
        # Rounded up, so that thousands that came one after the other are due together.
        self._next_ns = min(self._next_ns, -(-at_ns // _GRAIN_NS) * _GRAIN_NS)

    # -- one channel ---------------------------------------------------------------

    def _proceed(self, unready: _Unready, now_ns: int) -> None:
        """Go on with TLS and SASL until bytes are missing, or they succeed or fail.

        Do nothing while the connection waits for its failure delay or for a retry.
        """
        if unready.close_ns or unready.retry_ns:
            return  # nothing more is read
        if not unready.has_handshake and not self._shake_hands(unready):
            return
        if not self._security.has_sasl:
            self._admit(unready, unready.user, None)
            return
        if unready.authenticator is None:
            unready.authenticator = self._security.authenticator()
        while self._send(unready):
            if unready.authenticator.state is AuthenticatorState.COMPLETE:
                session = unready.authenticator.session
                assert session is not None
                self._admit(unready, session.user, session)
                return
            if not self._read_frame(unready):
                return
            if not self._answer(unready, now_ns):
                return

    def _shake_hands(self, unready: _Unready) -> bool:
        """Continue the TLS handshake; return whether it is done.

        If it fails, close the connection.
        """
        import ssl

        channel = unready.channel
        try:
            if not isinstance(channel.sock, ssl.SSLSocket):
                head = channel.sock.recv(_PEEKED, socket.MSG_PEEK)
                if head[:1] != _TLS_HANDSHAKE:
                    if head:
                        why = explain_no_tls(head, self._security.protocol)
                        self._fail(unready, R.NOT_TLS, why)
                    else:
                        self._close(unready, ProcessorCounter.CLOSED_BY_PEER)
                    return False
                unready.security = self._security
                channel.sock = unready.security.wrap(channel.sock)
            sock, security = channel.sock, unready.security
            sock.do_handshake()
            assert security is not None
            # The rules and the certificate authorities must be of the same settings.
            unready.user = security.user_of_certificate(sock)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except (OSError, ValueError) as error:
            self._handshake_failed(unready, error)
            return False
        except SaslError as error:
            self._fail(unready, error.result, error.detail)
            return False
        except Exception:  # noqa: BLE001 - a library's, or a bug of ours
            _LOG.exception("a bug in the TLS handshake: its client is not admitted")
            self._fail(unready, R.TLS_OTHER, "TLS handshake: an unexpected error")
            return False
        self._counts.count(R.HANDSHAKE)
        unready.has_handshake = True
        return True

    def _handshake_failed(self, unready: _Unready, error: OSError | ValueError) -> None:
        from mpbroker.network.security.tls import judge_failure

        if isinstance(error, OSError):
            result, why = judge_failure(error)
        else:
            result, why = R.TLS_OTHER, str(error)
        self._fail(unready, result, f"TLS handshake: {why}")

    def _read_frame(self, unready: _Unready) -> bool:
        """Continue to read a frame; return whether it is whole.

        Close the connection if its length is not valid, or the client has hung up.
        """
        buffer = unready.buffer
        while True:
            wanted = (unready.frame_bytes or _SIZE_BYTES) - len(buffer)
            if wanted == 0:
                if unready.frame_bytes:
                    return True
                try:
                    unready.frame_bytes = self._frame_bytes(bytes(buffer))
                except FrameLengthError as error:
                    large = buffer[0] == 0
                    self._fail(
                        unready, R.TOO_LARGE if large else R.NOT_SASL, str(error)
                    )
                    return False
                continue
            into = self._chunk[: min(wanted, _CHUNK_BYTES)]
            channel = unready.channel
            if not channel.readable:
                return False
            count = self._selector.receive(channel, into)
            if count == 0:
                return False
            if count == CLOSED:
                if unready.streams.received:
                    self._counts.count(R.GONE)
                self._close(unready, ProcessorCounter.CLOSED_BY_PEER)
                return False
            buffer += into[:count]
            unready.streams.received += count

    def _frame_bytes(self, head: bytes) -> int:
        sasl = self._security.sasl
        assert sasl is not None
        length = int.from_bytes(head, "big", signed=True)
        if not 0 <= length <= sasl.max_receive_bytes:
            raise FrameLengthError(
                explain_bad_length(
                    head,
                    sasl.max_receive_bytes,
                    "sasl.server.max.receive.size",
                    self._security.protocol,
                )
            )
        return length + _SIZE_BYTES

    def _answer(self, unready: _Unready, now_ns: int) -> bool:
        """Give a whole frame to the authenticator, and keep its answer for ``_send``.

        Returns:
            Whether to continue at once. False if the authentication has failed, which
            is answered after a delay. False also if the token cannot be judged yet.
        """
        authenticator = unready.authenticator
        assert authenticator is not None
        frame = memoryview(bytes(unready.buffer))[_SIZE_BYTES:]
        try:
            answer = authenticator.handle(frame, wall_ms())
        except NotYetError:
            unready.retry_ns = now_ns + _RETRY_NS
            self._due(unready.retry_ns)
            return False
        unready.buffer.clear()
        unready.frame_bytes = 0
        unready.answer = memoryview(answer)
        error = authenticator.error
        if error is None:
            return True
        # The answer is delayed, to slow down clients that guess passwords.
        self._note_failure(unready, error.result, error.detail)
        unready.close_ns = now_ns + max(1, self._security.failure_delay_ns)
        self._due(unready.close_ns)
        return False

    def _send(self, unready: _Unready) -> bool:
        """Continue to send the answer to the last frame; return whether all is sent."""
        while unready.answer:
            count = self._selector.send(unready.channel, unready.answer)
            if count == CLOSED:
                if not unready.close_ns:
                    self._close(unready, ProcessorCounter.CLOSED_BY_PEER)
                return False
            if count == 0:
                return False
            unready.answer = unready.answer[count:]
            unready.streams.sent += count
        return True

    # -- ends ----------------------------------------------------------------------

    def _admit(self, unready: _Unready, user: str, session: Session | None) -> None:
        channel = unready.channel
        try:
            self._admitted(channel, user, session, unready.streams)
        except PrincipalsFullError as error:
            self._fail(unready, R.UNAVAILABLE, str(error))
            return
        del self._by_fd[channel.fd]

    def _fail(self, unready: _Unready, result: R, why: str) -> None:
        self._note_failure(unready, result, why)
        self._close(unready, ProcessorCounter.CLOSED_ERROR)

    def _note_failure(self, unready: _Unready, result: R, why: str) -> None:
        self._counts.count(result)
        name = self._name(unready.channel.connection)
        _LOG.info("%s: closed: %s", name, why)

    def _close(self, unready: _Unready, reason: ProcessorCounter) -> None:
        del self._by_fd[unready.channel.fd]
        self._closed(unready.channel, reason)
