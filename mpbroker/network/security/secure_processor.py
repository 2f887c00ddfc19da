"""The processor of a listener whose clients must prove who they are.

A connection begins unready (unready_channels.py); once admitted it is like any other,
but for three things. Over TLS it is private: nobody else can carry it on, so it ends
when its processor goes. Where sessions end (connections.max.reauth.ms, or a token that
expires) each request is looked at before it is published: a SaslHandshake begins a new
authentication, and any other request after the end closes the connection. And the
compiled turn, which publishes without looking, serves neither of these.

Source: Kafka SocketServer.Processor.processCompletedReceives; KIP-368.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from mpbroker.base.logger import get_logger
from mpbroker.ipc.arena import (
    ANSWER_AT,
    ANSWER_BYTES,
    REQUEST_PART_BYTES,
    progress_offset,
)
from mpbroker.ipc.counters.authentication_counts import (
    AuthenticationCounts,
    AuthenticationResult,
)
from mpbroker.ipc.layout import (
    CONNECTION_PRINCIPAL,
    ConnectionSecurity,
    ConnectionState,
    ProcessorCounter,
)
from mpbroker.ipc.tables.principals import Principals
from mpbroker.network.channel import Channel, ChannelEvent, next_state
from mpbroker.network.channel_selector import HANG_UP
from mpbroker.network.connection_rows import security_of, session_end_ms
from mpbroker.network.moves.departures import ALL
from mpbroker.network.processor import Processor, ProcessorParts
from mpbroker.network.security.listener_authentication import (
    ListenerSecurity,
    mechanism_of_security,
    security_of_mechanism,
    wall_ms,
)
from mpbroker.network.security.sasl.authenticator import (
    AuthenticatorState,
    SaslServerAuthenticator,
    Session,
)
from mpbroker.network.security.sasl.mechanism import NotYetError
from mpbroker.network.security.secure_selector import SecureSelector, TlsSelector
from mpbroker.network.security.unready_channels import USER, Streams, UnreadyChannels
from mpbroker.protocol.api_key import ApiKey

_LOG = get_logger(__name__)
R = AuthenticationResult

_SIZE_BYTES: Final = 4
_MS: Final = 1_000_000
_READING: Final = ConnectionState.READING
# Kafka's MIN_REAUTH_INTERVAL_ONE_SECOND_NANOS: no client keeps us busy with it.
_MIN_REAUTH_NS: Final = 1_000_000_000
# So long a connection stays where it has begun to authenticate again: half of that is
# in its processor's own memory. Who takes longer has had to be asked for a password.
_REAUTH_NS: Final = 10_000_000_000
_SASL_HANDSHAKE: Final = int(ApiKey.SASL_HANDSHAKE)
_SASL_AUTHENTICATE: Final = int(ApiKey.SASL_AUTHENTICATE)


class _Lease(NamedTuple):
    """An admitted connection's session, where sessions end."""

    session: Session  # ends_ms: monotonic here, not wall clock
    reauthenticated_ns: int
    was_elsewhere: bool = False  # since it last began to authenticate


class SecureProcessor(Processor):
    """As Processor, which see; and further:

    Args:
        security: of its listener.
        news: asked at each new connection: another security, or None.
        principals: numbers for connections' rows.
    """

    def __init__(
        self,
        processor: int,
        parts: ProcessorParts,
        *limits: int,
        security: ListenerSecurity,
        principals: Principals,
        news: Callable[[], ListenerSecurity | None] = lambda: None,
    ) -> None:
        selector = TlsSelector() if security.has_tls else SecureSelector()
        self._make_selector = lambda: selector
        super().__init__(processor, parts, *limits)
        self._security = security
        self._news = news
        # From the first that has any: connections of its time have leases.
        self._has_sessions = security.has_sessions
        self._principals = principals
        self._secure_selector = selector
        self._counts = AuthenticationCounts(processor, parts.control.words)
        self._connections.security = ConnectionSecurity.PRIVATE
        self._connections.opened = self._opened
        self._unready = UnreadyChannels(
            security,
            selector,
            self._counts,
            self._rows.name,
            self._admit,
            self._connections.close,
        )
        selector.unready = self._connections.unready
        selector.due_s = self._due_s
        self._leases: dict[int, _Lease] = {}  # by connection
        self._authenticators: dict[int, SaslServerAuthenticator] = {}  # likewise
        self._retries: list[Channel] = []  # their tokens can be judged a little later
        if security.has_tls or security.has_sessions:
            self._compiled = None

    def turn(self) -> None:
        super().turn()
        events = self._secure_selector.take_events()
        for fd, event in events:
            channel = self._connections.unready.get(fd)
            if channel is not None:
                self._unready.process(
                    channel, self._now, has_ended=bool(event & HANG_UP)
                )
        if self._retries:
            retries, self._retries = self._retries, []
            for channel in retries:
                channel.waiting = False
                if self._connections.is_here(channel):
                    self._receive(channel)
        if self._unready:
            self._unready.tick(self._now)
        self._requests.flush()
        if events:
            self._busy = True

    def _poll_in_core(self, *, may_stay: bool) -> list[tuple[int, int]]:
        return self._secure_selector.sift(super()._poll_in_core(may_stay=may_stay))

    def _wait_s(self) -> float:
        return max(0.0, min(super()._wait_s(), self._due_s()))

    def _due_s(self) -> float:
        if self._retries:
            return 0.01
        return (self._unready.next_ns - time.monotonic_ns()) / 1e9

    def _opened(self, channel: Channel) -> None:
        fresh = self._news()
        if fresh is not None:
            self._security = fresh
            self._unready.use(fresh)
            if fresh.has_sessions:
                self._end_sessions()
        self._unready.begin(channel, self._now)

    def _end_sessions(self) -> None:
        """From now on, those that end: each request is looked at before it goes."""
        self._has_sessions, self._compiled = True, None

    # -- admission -----------------------------------------------------------------

    def _admit(
        self, channel: Channel, user: str, session: Session | None, streams: Streams
    ) -> None:
        """Let a connection send requests.

        Raises:
            PrincipalsFullError: there is no number for who it is.
        """
        number = self._principals.number_of(USER + user)
        has_tls = self._security.has_tls
        if not has_tls:
            channel.base, channel.sent = streams.received, streams.sent
            self._rows.begin(channel.row, channel.base, channel.sent)
        security, ends_ms = ConnectionSecurity.PRIVATE, 0
        if session is not None:
            ends_ms = self._lease(channel, session)
            if not has_tls:
                security = security_of_mechanism(session.mechanism)
            self._counts.count(R.AUTHENTICATED)
        if has_tls:
            from mpbroker.network.security.encryption import encryption_word

            self._rows.encrypted(channel.connection, encryption_word(channel.sock))
        self._rows.authenticated(channel.connection, number, security, ends_ms)
        self._connections.admit(channel)
        if not has_tls:
            # The keeper that was told of it may have died since.
            self._keeper.keep([channel.sock])
        channel.active_ns = self._now
        self._receive(channel)

    def _lease(self, channel: Channel, session: Session, since_ns: int = 0) -> int:
        """Note when a session ends; return that, ms, monotonic, or 0."""
        if not self._has_sessions:
            return 0
        self._authenticators.pop(channel.connection, None)  # of the row's last one
        ends_ms = session.ends_ms
        if ends_ms:
            # A clock that is set must neither end sessions nor prolong them.
            ends_ms = max(1, ends_ms - wall_ms() + time.monotonic_ns() // _MS)
        self._leases[channel.connection] = _Lease(
            session._replace(ends_ms=ends_ms), since_ns
        )
        return ends_ms

    def _adopt(self, connection: int, *others: Any) -> None:
        words = self._words
        if session_end_ms(words, connection):
            self._end_sessions()  # it began by settings that we have not seen
        if self._has_sessions:
            number = words[self._rows.word(connection) + CONNECTION_PRINCIPAL]
            session = Session(
                self._principals.name(number).removeprefix(USER),
                mechanism_of_security(security_of(words, connection)),
                session_end_ms(words, connection),
            )
            self._leases[connection] = _Lease(session, 0, was_elsewhere=True)
            self._authenticators.pop(connection, None)
        super()._adopt(connection, *others)

    # -- sessions ------------------------------------------------------------------

    def _publish(self, channel: Channel) -> None:
        lease = self._leases.get(channel.connection)
        if lease is None or not lease.session.ends_ms:
            super()._publish(channel)
            return
        frame = self._frame(channel)
        authenticator = self._authenticators.get(channel.connection)
        if authenticator is None and self._begins_again(frame, lease):
            session = lease.session
            authenticator = self._security.authenticator(session)
            self._authenticators[channel.connection] = authenticator
            self._leases[channel.connection] = _Lease(session, self._now)
        if authenticator is not None:
            self._reauthenticate(channel, authenticator, frame)
        elif self._now // _MS > lease.session.ends_ms:
            self._counts.count(R.SESSION_EXPIRED)
            _LOG.info(
                "%s: closed: its session has ended, and it did not authenticate again",
                self._rows.name(channel.connection),
            )
            self._end(channel)
        elif lease.was_elsewhere and _api_key(frame) == _SASL_AUTHENTICATE:
            # A handler would say that it is out of order, which clients take for the
            # end; of a lost connection they just make another.
            name = self._rows.name(channel.connection)
            _LOG.info("%s: closed: it began to authenticate elsewhere", name)
            self._end(channel)
        else:
            super()._publish(channel)

    def _frame(self, channel: Channel) -> memoryview:
        """The request that is there, without its size field."""
        if channel.extent:
            start, end = channel.extent, channel.extent + channel.extent_length
        else:
            start = channel.block + channel.start
            end = channel.block + channel.frame_end
        return self._arena.view[start + _SIZE_BYTES : end]

    def _begins_again(self, frame: memoryview, lease: _Lease) -> bool:
        return (
            _api_key(frame) == _SASL_HANDSHAKE
            and self._now - lease.reauthenticated_ns >= _MIN_REAUTH_NS
        )

    def _reauthenticate(
        self,
        channel: Channel,
        authenticator: SaslServerAuthenticator,
        frame: memoryview,
    ) -> None:
        sasl = self._security.sasl
        assert sasl is not None
        if len(frame) > sasl.max_receive_bytes:
            self._counts.count(R.TOO_LARGE)
            self._end(channel)
            return
        try:
            answer = authenticator.handle(frame, wall_ms())
        except NotYetError:
            channel.waiting = True
            self._retries.append(channel)
            return
        if authenticator.state is AuthenticatorState.COMPLETE:
            session = authenticator.session
            assert session is not None
            security = security_of(self._words, channel.connection)
            number = self._words[channel.row + CONNECTION_PRINCIPAL]
            began_ns = self._leases[channel.connection].reauthenticated_ns
            ends_ms = self._lease(channel, session, self._now)
            self._rows.authenticated(channel.connection, number, security, ends_ms)
            self._counts.count_again(time.monotonic_ns() - began_ns)
        elif authenticator.error is not None:
            error = authenticator.error
            self._counts.count(error.result)
            name = self._rows.name(channel.connection)
            _LOG.info("%s: closed: authenticating again: %s", name, error.detail)
            self._selector.send(channel, memoryview(answer))
            self._end(channel)
            return
        self._answer_here(channel, answer)

    def _answer_here(self, channel: Channel, answer: bytes) -> None:
        """Answer a request without a handler, as if one had done it.

        Whoever takes over finds what it would find of any answer under way.
        """
        assert len(answer) <= ANSWER_BYTES
        if channel.extent:
            offset = channel.extent + _SIZE_BYTES
            length = channel.extent_length - _SIZE_BYTES
            progress = progress_offset(channel.extent, channel.extent_length)
        else:
            offset = channel.block + channel.start + _SIZE_BYTES
            length = channel.frame_end - channel.start - _SIZE_BYTES
            progress = channel.block + REQUEST_PART_BYTES
        channel.state = next_state(channel.state, ChannelEvent.REQUEST_PUBLISHED)
        self._rows.set_state(channel.row, channel.state, self._now)
        slot = channel.slot
        self._in_flight[slot - self._first_slot] = channel
        at = channel.block + ANSWER_AT
        self._arena.view[at : at + len(answer)] = answer
        self._requests.answer_here(
            slot, offset, length, progress, self._now, (at, len(answer))
        )
        channel.state = next_state(channel.state, ChannelEvent.RESPONSE_TAKEN)
        self._metrics.taken(slot, self._now)
        self._send(channel, 0)

    def _end(self, channel: Channel) -> None:
        self._authenticators.pop(channel.connection, None)
        self._connections.close(channel, ProcessorCounter.CLOSED_ERROR)

    # -- connections that go -------------------------------------------------------

    def _look(self) -> None:
        super()._look()
        if self._departures.left == ALL:
            self._unready.close_all()

    def _depart(self) -> None:
        """Over TLS nothing can go elsewhere: say good-bye, if all must go."""
        if not self._security.has_tls:
            since = self._now - _REAUTH_NS
            self._reader.staying = {
                connection
                for connection in self._authenticators
                if self._leases[connection].reauthenticated_ns > since
            }
            super()._depart()
            return
        departures = self._departures
        idle = [each for each in self._channels.values() if each.state == _READING]
        if departures.left == ALL:
            self._unready.close_all()
            for channel in idle:
                self._connections.close(channel, ProcessorCounter.CLOSED_BY_HANDLER)
        else:
            departures.left = 0
            self._stay(idle)
        departures.send()
        departures.note_progress(len(self._channels))

    def _has_retired(self) -> bool:
        return not len(self._unready) and super()._has_retired()

    def _drain(self) -> None:
        self._unready.close_all()
        super()._drain()


def _api_key(frame: memoryview) -> int:
    return int.from_bytes(frame[:2], "big")
