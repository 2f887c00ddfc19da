"""Sessions of the console: users that have logged in, each with a Kafka client."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.cookies import CookieError, SimpleCookie
from typing import Any, Final

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.cluster import Cluster

_COOKIE: Final = "mpbroker_console"
MAX_SESSIONS: Final = 64
IDLE_S: Final = 30 * 60.0
LONGEST_S: Final = 12 * 3600.0
_CLIENT_S: Final = 15.0  # to wait until another request gives back the client
_LIST_S: Final = 3.0  # that a list stays in the cache


class BusyError(MpbrokerError):
    """An error: another request uses the session's client, or the session has ended."""


class Session:
    """The session of a user that has logged in to the console.

    Attributes:
        user: the user's name; "" if there is no login.
        csrf: a token that only a page of this console knows; each change carries it.
        settings: the settings of a Kafka client that acts as this user; they have the
            password.
        made: when the session began, in seconds of the clock of Sessions.
        used: when the session was last used, by the same clock.
    """

    def __init__(
        self, user: str, settings: Mapping[str, object], cluster: Cluster, now: float
    ) -> None:
        self.user = user
        self.csrf = secrets.token_urlsafe(32)
        self.settings = settings
        self._cluster = cluster
        self._lock = threading.Lock()  # held by the one thread that uses the client
        self._is_closed = False
        self._is_client_closed = False
        self.made = now
        self.used = now
        self._lists: dict[str, tuple[float, list[dict[str, Any]]]] = {}

    @contextmanager
    def client(self) -> Iterator[Cluster]:
        """Lend this session's Kafka client to one thread.

        Raises:
            BusyError: another request uses the client for too long, or the session has
                ended.
        """
        if not self._lock.acquire(timeout=_CLIENT_S):
            raise BusyError("another request of this session takes too long")
        try:
            if self._is_closed:
                raise BusyError("this session has ended")
            yield self._cluster
        finally:
            self._lock.release()
            # After the release, and after an error too: a close() that found the lock
            # held, up to the release itself, has left the client to this thread.
            if self._is_closed:
                self._close_client()

    def remembered(
        self,
        name: str,
        ask: Callable[[Cluster], list[dict[str, Any]]],
        *,
        is_fresh: bool,
    ) -> list[dict[str, Any]]:
        """Return a list from the cache, or from ``ask`` if it is some seconds old.

        So the broker need not list its topics, which may be 10,000, for each page.

        Args:
            name: the list's name in the cache.
            ask: gets the list from the broker.
            is_fresh: whether to call ``ask`` even if the cached list is recent.
        """
        at, found = self._lists.get(name, (0.0, []))
        now = time.monotonic()
        if is_fresh or not at or now - at > _LIST_S:
            with self.client() as cluster:
                found = ask(cluster)
            self._lists[name] = now, found
        return found

    def close(self) -> None:
        """Close the session's client, or leave that to the request that uses it."""
        self._is_closed = True
        self._close_client()

    def _close_client(self) -> None:
        """Close the client, unless a thread has it: that one closes it."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self._is_client_closed:
                self._is_client_closed = True
                self._cluster.close()
        finally:
            self._lock.release()


class Sessions:
    """The open sessions, by the token in the browser's cookie; at most MAX_SESSIONS.

    One more ends the session that has been unused for the longest time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._by_token: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_token)

    def open(
        self, user: str, settings: Mapping[str, object], cluster: Cluster
    ) -> tuple[str, Session]:
        """Begin the session of a logged-in user; return its token, and the session."""
        token = secrets.token_urlsafe(32)
        session = Session(user, settings, cluster, self._clock())
        with self._lock:
            ended = []
            while len(self._by_token) >= MAX_SESSIONS:
                oldest = min(self._by_token, key=lambda key: self._by_token[key].used)
                ended.append(self._by_token.pop(oldest))
            self._by_token[token] = session
        _close(ended)
        return token, session

    def find(self, token: str) -> Session | None:
        """Return the open session of a token and note its use; None: there is none."""
        now = self._clock()
        with self._lock:
            session = self._by_token.get(token)
            if session is None or _is_over(session, now):
                return None
            session.used = now
            return session

    def end(self, token: str) -> None:
        with self._lock:
            session = self._by_token.pop(token, None)
        _close([session] if session is not None else [])

    def expire(self) -> None:
        """End the sessions that are older than LONGEST_S, or unused for IDLE_S."""
        now = self._clock()
        with self._lock:
            over = [key for key, each in self._by_token.items() if _is_over(each, now)]
            ended = [self._by_token.pop(key) for key in over]
        _close(ended)


def cookie_name(host: str) -> str:
    """Return the name of the cookie of the console at an address.

    Browsers send a host's cookies to each of its ports, so the port is in the name: the
    consoles of two brokers on one host do not log each other's users out.

    Args:
        host: the header Host of a request.
    """
    port = host.rpartition(":")[2]
    return f"{_COOKIE}_{port}" if port.isascii() and port.isdigit() else _COOKIE


def token_of(headers: Mapping[str, str]) -> str:
    """Return the token in a request's cookies; "" if there is none."""
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    found = cookies.get(cookie_name(headers.get("host", "")))
    return found.value if found is not None else ""


def cookie(name: str, token: str, *, is_secure: bool) -> tuple[str, str]:
    """Return the Set-Cookie header for a session's token; "" removes the cookie."""
    age = int(LONGEST_S) if token else 0
    text = f"{name}={token}; Path=/; Max-Age={age}; HttpOnly; SameSite=Strict"
    return "Set-Cookie", text + ("; Secure" if is_secure else "")


def _is_over(session: Session, now: float) -> bool:
    return now - session.used > IDLE_S or now - session.made > LONGEST_S


def _close(sessions: list[Session]) -> None:
    for each in sessions:
        each.close()
