"""A session's client is closed once, whatever its last request did meanwhile."""

from __future__ import annotations

import threading

import pytest

from mpbroker.console.sessions import BusyError, Session, cookie, cookie_name, token_of


class Client:
    """Counts how often it is closed."""

    def __init__(self):
        self.closed = 0

    def close(self):
        self.closed += 1


class LateClose:
    """A lock that closes the session just before the first thread lets it go."""

    def __init__(self, session):
        self._session = session
        self._lock = threading.Lock()

    def acquire(self, blocking=True, timeout=-1):
        return self._lock.acquire(blocking, timeout)

    def release(self):
        session, self._session = self._session, None
        if session is not None:
            session.close()
        self._lock.release()


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def session(client):
    return Session("alice", {}, client, 0.0)


def test_an_idle_session_closes_its_client_at_once(session, client):
    session.close()
    session.close()
    assert client.closed == 1
    with pytest.raises(BusyError, match="has ended"), session.client():
        raise AssertionError("a closed session has lent its client")
    assert client.closed == 1


def test_a_request_that_goes_on_closes_the_client_at_its_end(session, client):
    with session.client():
        session.close()
        assert client.closed == 0
    assert client.closed == 1


def test_a_request_that_fails_closes_the_client_too(session, client):
    def ask():
        with session.client():
            session.close()
            raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        ask()
    assert client.closed == 1


def test_a_close_between_the_last_look_and_the_release_is_seen(session, client):
    session._lock = LateClose(session)
    with session.client():
        pass
    assert client.closed == 1


def test_who_waits_for_the_client_of_an_ending_session_is_told(session, client):
    told = []

    def ask():
        try:
            with session.client():
                told.append("lent")
        except BusyError as error:
            told.append(str(error))

    with session.client():
        waiting = threading.Thread(target=ask)
        waiting.start()
        session.close()
    waiting.join()
    assert told == ["this session has ended"]
    assert client.closed == 1


def test_consoles_on_two_ports_of_a_host_have_a_cookie_each():
    hosts = ["localhost:8080", "localhost:8081", "[::1]:8080", "localhost", "[::1]"]
    names = [cookie_name(host) for host in hosts]
    assert len(set(names)) == 3
    sent = "; ".join(
        cookie(name, f"of-{name}", is_secure=True)[1].partition(";")[0]
        for name in names
    )
    for host, name in zip(hosts, names, strict=True):
        assert token_of({"host": host, "cookie": sent}) == f"of-{name}"
