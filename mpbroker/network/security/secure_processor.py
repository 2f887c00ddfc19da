"""SecureProcessor: the processor of a listener with TLS or SASL.

A connection begins unready: it must authenticate first (unready_channels.py). Once
admitted it is like any other, with two exceptions. Over TLS it is private: no other
process can continue it, so it ends with its processor. If sessions expire
(connections.max.reauth.ms, or a token that expires), each request is checked before it
is published. A SaslHandshake begins a new authentication. Any other request that comes
after the session's end closes the connection.

The compiled turn has no such check and no TLS. So it is not used for a listener with
TLS, nor for one whose sessions may expire.

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
# Kafka's MIN_REAUTH_INTERVAL_ONE_SECOND_NANOS: the least time between two attempts.
_MIN_REAUTH_NS: Final = 1_000_000_000
# How long a connection that has begun to authenticate again stays with its processor,
# since the state is in private memory. A client takes longer only if a user has to type
# a password.
_REAUTH_NS: Final = 10_000_000_000
_SASL_HANDSHAKE: Final = int(ApiKey.SASL_HANDSHAKE)
_SASL_AUTHENTICATE: Final = int(ApiKey.SASL_AUTHENTICATE)


class _Lease(NamedTuple):
    """Holds the session of an authenticated connection, if sessions may expire."""

    session: Session  # ends_ms: monotonic here, not wall clock
    reauthenticated_ns: int
    was_elsewhere: bool = False  # it came from another processor since the last attempt


class SecureProcessor(Processor):
    """Serves connections like `Processor`, after the clients have authenticated.

    Args:
        processor: the processor's id.
        parts: what the processor shares with other processes.
        limits: max_request_bytes and max_idle_ns, as for Processor.
        security: the listener's security.
        principals: gives each principal (authenticated user) a number, for the
            connections' records in shared memory.
        news: called at each new connection. It returns the listener's new security if
            its settings have changed, otherwise None.
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
        # Stays True once sessions could expire: connections of that time have leases.
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
            parts.control.words,
            self._rows.name,
            self._admit,
            self._connections.close,
        )
        selector.unready = self._connections.unready
        selector.due_s = self._due_s
        self._leases: dict[int, _Lease] = {}  # by connection
        self._authenticators: dict[int, SaslServerAuthenticator] = {}  # likewise
        self._retries: list[Channel] = []  # their tokens cannot be judged yet
        if security.has_tls or security.has_sessions:
            self._compiled = None

    def turn(self) -> None:
        super().turn()
        events = self._secure_selector.take_events()
        for fd, event in events:
            channel = self._connections.unready.get(fd)
            if channel is not None:
                self._unready.note_event(channel, has_ended=bool(event & HANG_UP))
        if self._unready.can_go_on:
            self._unready.go_on(self._now)
        if self._retries:
            retries, self._retries = self._retries, []
            for channel in retries:
                channel.waiting = False
                if self._connections.is_here(channel):
                    self._receive(channel)
        if self._unready:
            self._unready.tick(self._now)
        self._requests.flush()
        if events or self._unready.can_go_on:
            self._busy = True

    def _poll_in_core(self, *, may_stay: bool) -> list[tuple[int, int]]:
        may_stay = may_stay and not self._unready.can_go_on
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
        """From now on check the session of each request before it is published.

        The C code has no such check, so Python serves all requests from here on.
        """
        self._has_sessions, self._compiled = True, None

    # -- admission -----------------------------------------------------------------

    def _admit(
        self, channel: Channel, user: str, session: Session | None, streams: Streams
    ) -> None:
        """Let a connection send requests, and note its user in shared memory.

        Args:
            channel: the connection.
            user: the client's user, without "User:".
            session: the result of SASL; None if the listener has no SASL.
            streams: counts the bytes that were received and sent so far, without TLS.

        Raises:
            PrincipalsFullError: there is no number for its principal.
        """
        # Until the row has the number, no other process may free it.
        with self._principals.assigning(USER + user) as number:
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
            self._rows.authenticated(
                channel.connection,
                number,
                security,
                ends_ms,
                by_token=session is not None and session.by_token,
            )
        self._connections.admit(channel)
        if not has_tls:
            # The keeper that has a duplicate may have died since.
            self._keeper.keep([channel.sock])
        channel.active_ns = self._now
        self._receive(channel)

    def _lease(self, channel: Channel, session: Session, since_ns: int = 0) -> int:
        """Keep a connection's session, to check its end at each request.

        Do nothing, and return 0, if no session of this listener can expire.

        Args:
            channel: the connection.
            session: the session; its end is in wall clock time.
            since_ns: when the last re-authentication began; 0: there was none.

        Returns:
            When the session ends, in monotonic ms; 0 if it does not end.
        """
        if not self._has_sessions:
            return 0
        self._authenticators.pop(channel.connection, None)  # of the row's last one
        ends_ms = session.ends_ms
        if ends_ms:
            # Monotonic, so that setting the clock neither ends nor prolongs sessions.
            ends_ms = max(1, ends_ms - wall_ms() + time.monotonic_ns() // _MS)
        self._leases[channel.connection] = _Lease(
            session._replace(ends_ms=ends_ms), since_ns
        )
        return ends_ms

    def _adopt(self, connection: int, *others: Any) -> None:
        words = self._words
        if session_end_ms(words, connection):
            self._end_sessions()  # its settings are newer than ours
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
                "%s: closed: its session has expired without re-authentication",
                self._rows.name(channel.connection),
            )
            self._end(channel)
        elif lease.was_elsewhere and _api_key(frame) == _SASL_AUTHENTICATE:
            # A handler would answer that the request is out of order, and clients would
            # give up. After a lost connection they just make another one.
            name = self._rows.name(channel.connection)
            _LOG.info("%s: closed: its authentication began in another process", name)
            self._end(channel)
        else:
            super()._publish(channel)

    def _frame(self, channel: Channel) -> memoryview:
        """Return the request in the channel's slot, without its size field."""
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
            self._rows.authenticated(
                channel.connection,
                number,
                security,
                ends_ms,
                by_token=session.by_token,
            )
            self._counts.count_again(time.monotonic_ns() - began_ns)
        elif authenticator.error is not None:
            error = authenticator.error
            self._counts.count(error.result)
            name = self._rows.name(channel.connection)
            _LOG.info("%s: closed: re-authentication failed: %s", name, error.detail)
            self._selector.send(channel, memoryview(answer))
            self._end(channel)
            return
        if len(answer) > ANSWER_BYTES:
            # More would be written into the next slot's block, another client's.
            self._counts.count(R.TOO_LARGE)
            _LOG.error(
                "%s: closed: the answer to its re-authentication has %d bytes; at most"
                " %d can be sent",
                self._rows.name(channel.connection),
                len(answer),
                ANSWER_BYTES,
            )
            self._end(channel)
            return
        self._answer_here(channel, answer)

    def _answer_here(self, channel: Channel, answer: bytes) -> None:
        """Answer a request in this process, with the slot states of a handler's answer.

        So a process that takes the connection over finds the same as for any other
        answer.

        Args:
            channel: the connection.
            answer: at most ANSWER_BYTES, which the caller has checked.
        """
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

    # -- connections that are given away -------------------------------------------

    def _look(self) -> None:
        super()._look()
        if self._departures.left == ALL:
            self._unready.close_all()

    def _depart(self) -> None:
        """Give connections away if they are not over TLS.

        A connection that began to authenticate again less than ten seconds ago stays.
        Over TLS none can be given away: close the idle ones if all connections must go,
        and otherwise keep all.
        """
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
