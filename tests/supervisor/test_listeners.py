"""Listen sockets: opened all or none, and said well why not."""

from __future__ import annotations

import gc
import os
import socket
import sys
import tempfile

import pytest

from mpbroker.config.broker_config import BrokerConfig
from mpbroker.config.listeners import EndPoint, parse_listeners
from mpbroker.supervisor.listen_sockets import (
    AddressError,
    Origin,
    close_listeners,
    open_listeners,
)
from mpbroker.supervisor.systemd import InheritedSocket


def endpoints(*texts: str) -> list[EndPoint]:
    protocols = {"PLAINTEXT": "PLAINTEXT", "B": "PLAINTEXT"}
    return list(parse_listeners(list(texts), protocols, key="listeners"))


@pytest.fixture
def opened():
    made = []

    def open_them(*texts, backlog=50, receive_buffer=-1):
        made.extend(open_listeners(endpoints(*texts), backlog, receive_buffer))
        return made[-len(texts) :]

    yield open_them
    for listener in made:
        listener.sock.close()


def waiting_at_most(listener):
    # struct tcp_info: of a listening socket tcpi_sacked is the length of its queue.
    told = listener.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
    return int.from_bytes(told[28:32], sys.byteorder)


def can_connect(host, port):
    with socket.create_connection((host, port), timeout=60):
        return True


def test_port_0_is_any_free_port_and_the_address_names_it(opened):
    (listener,) = opened("PLAINTEXT://127.0.0.1:0")
    assert listener.port > 0
    assert listener.address == f"127.0.0.1:{listener.port}"
    assert can_connect("127.0.0.1", listener.port)


def test_listeners_are_numbered_in_order(opened):
    first, second = opened("PLAINTEXT://127.0.0.1:0", "B://127.0.0.1:0")
    assert (first.number, second.number) == (0, 1)
    assert first.port != second.port


def test_an_ipv6_address_is_dialled_in_brackets(opened):
    (listener,) = opened("PLAINTEXT://[::1]:0")
    assert listener.address == f"[::1]:{listener.port}"
    assert listener.told == f"PLAINTEXT on [::1]:{listener.port}"
    assert can_connect("::1", listener.port)


def test_the_wildcard_serves_ipv4_and_ipv6(opened):
    (listener,) = opened("PLAINTEXT://:0")
    assert can_connect("127.0.0.1", listener.port)
    assert can_connect("::1", listener.port)
    host, _, port = listener.address.rpartition(":")
    assert can_connect(host.strip("[]"), int(port))
    assert listener.told == f"PLAINTEXT on [::]:{port}"


def test_0_0_0_0_serves_ipv4_only(opened):
    (listener,) = opened("PLAINTEXT://0.0.0.0:0")
    assert can_connect("127.0.0.1", listener.port)
    assert listener.address == f"127.0.0.1:{listener.port}"
    assert listener.told == f"PLAINTEXT on 0.0.0.0:{listener.port}"
    with pytest.raises(ConnectionRefusedError):
        can_connect("::1", listener.port)


def test_connections_begin_with_the_receive_buffer_that_was_set(opened):
    """Of the listening socket: the window that a client is told first follows it."""
    for wanted in (30_000, -1):
        (listener,) = opened("PLAINTEXT://127.0.0.1:0", receive_buffer=wanted)
        with socket.create_connection(("127.0.0.1", listener.port), timeout=60):
            listener.sock.setblocking(True)
            accepted, _ = listener.sock.accept()
            with accepted:
                size = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        # The kernel doubles what it is told, for what it needs itself.
        assert size == 60_000 if wanted > 0 else size != 60_000


def test_a_name_is_resolved(opened):
    (listener,) = opened("PLAINTEXT://localhost:0")
    assert can_connect("localhost", listener.port)


def test_a_port_in_use_is_told_in_one_line_with_what_to_do(opened):
    (taken,) = opened("PLAINTEXT://127.0.0.1:0")
    setting = f"PLAINTEXT://127.0.0.1:{taken.port}"
    with pytest.raises(AddressError) as refused:
        opened(setting)
    message = str(refused.value)
    assert "\n" not in message
    for part in (setting, "Address already in use", "another host or port"):
        assert part in message


def test_an_address_that_is_not_ours_is_told_too(opened):
    with pytest.raises(AddressError, match=r"203\.0\.113\.7.*Cannot assign"):
        opened("PLAINTEXT://203.0.113.7:9092")


def test_if_one_cannot_be_opened_none_is_left_open(opened):
    (taken,) = opened("PLAINTEXT://127.0.0.1:0")
    gc.collect()  # what earlier tests left may be closed now, and not in between
    before = os.listdir("/proc/self/fd")
    with pytest.raises(AddressError):
        opened("PLAINTEXT://127.0.0.1:0", f"B://127.0.0.1:{taken.port}")
    assert os.listdir("/proc/self/fd") == before


def test_a_unix_socket_of_the_service_manager_is_known_by_its_path():
    with tempfile.TemporaryDirectory(prefix="mpbroker-") as directory:
        path = f"{directory}/kafka.sock"
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(path)
            sock.listen()
            passed = InheritedSocket("mpbroker.socket", sock)
            wanted = endpoints(f"B://unix:{directory}/b", f"PLAINTEXT://unix:{path}")
            other, listener = open_listeners(wanted, 50, -1, [passed])
            assert listener.sock is sock and listener.origin is Origin.PASSED
            close_listeners([other, listener])
            assert os.listdir(directory) == ["kafka.sock"]  # the manager's


def test_the_file_that_another_has_put_in_its_place_is_left_alone(opened):
    with tempfile.TemporaryDirectory(prefix="mpbroker-") as directory:
        path = f"{directory}/kafka.sock"
        (first,) = opened(f"PLAINTEXT://unix:{path}")
        first.sock.close()  # it stops; what is under way may take a while
        (second,) = opened(f"PLAINTEXT://unix:{path}")
        close_listeners([first])
        assert os.path.exists(path)
        close_listeners([second])
        assert not os.path.exists(path)


def test_a_port_can_be_listened_on_again_right_after(opened):
    (listener,) = opened("PLAINTEXT://127.0.0.1:0")
    with socket.create_connection(("127.0.0.1", listener.port)):
        accepted, _ = listener.sock.accept()
        accepted.close()
    listener.sock.close()
    opened(f"PLAINTEXT://127.0.0.1:{listener.port}")


def test_as_many_wait_to_be_accepted_as_the_backlog_says(opened):
    (listener,) = opened("PLAINTEXT://127.0.0.1:0", backlog=37)
    assert waiting_at_most(listener) == 37


def test_by_default_as_many_may_wait_as_linux_allows(opened):
    # Of those who find Kafka's 50 taken each comes again a second later.
    with open("/proc/sys/net/core/somaxconn") as file:
        allowed = int(file.read())
    backlog = BrokerConfig.load({}, None, {}, cores=1).socket_listen_backlog_size
    (listener,) = opened("PLAINTEXT://127.0.0.1:0", backlog=backlog)
    assert waiting_at_most(listener) == min(4096, allowed)
