"""A newcomer with another layout of shared memory takes over, and no client notices."""

from __future__ import annotations

import os
import socket
import urllib.request
from contextlib import ExitStack

import pytest

from mpbroker.ipc.layout import COORDINATOR, HOUSEKEEPER, RowStatus
from mpbroker.ipc.tables.partition_table import LogState
from mpbroker.metadata.topics import RegistryHooks
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.delete_topics import DeleteTopicsRequest
from mpbroker.protocol.messages.fetch import FetchResponse
from mpbroker.protocol.records.record_batch import iter_records
from mpbroker.supervisor.upgrade.generation import Leaver
from tests.broker.load import (
    Load,
    api_versions,
    ask,
    children,
    create_topic,
    dial,
    frame,
    kill,
    produce_body,
    read_log,
    receive_frame,
)
from tests.broker.resizing import LOGGER_RESOURCE, alter
from tests.supervisor.test_connections import receive_rest
from tests.supervisor.test_kills import fetch_body
from tests.supervisor.test_resize import holdings
from tests.supervisor.upgrade.test_upgrade import (
    identity,
    newcomer,
    upgrade,
    wait_for_end,
)
from tests.support.children import wait_until
from tests.support.memory import broker_memory
from tests.support.metadata import start

LARGE = 5_000_000
SETTINGS = {
    "num.network.threads": 2,
    "num.io.threads": 2,
    "message.max.bytes": 2 * LARGE,
}


@pytest.fixture
def broker(make_broker):
    made = make_broker(SETTINGS)
    create_topic(made)
    return made


def change_generation(broker, version="9.9", *faults):
    upgrade(broker, newcomer(broker, version, "+".join(["layout", *faults])))
    return wait_for_end(broker, "done", "failed")


def test_it_takes_over_under_load_and_nobody_notices(broker):
    before = children(broker)
    with Load(broker, 8) as load:
        load.run(50)
        upgrade(broker, newcomer(broker, "9.9", "layout"))
        while identity(broker).get("version") != "9.9":
            assert "failed" not in identity(broker).get("upgrade", "")
            load.run(20)
        load.run(50)
        wait_for_end(broker, "done")
        load.run(50)
    assert sum(load.losses) == 0
    assert not set(before.values()) & set(children(broker).values())
    broker.stop()
    load.verify(read_log(broker.data_dir))


def test_it_goes_there_and_back_again_with_the_same_connections(broker):
    with ExitStack() as stack:
        socks = [stack.enter_context(dial(broker)) for _ in range(20)]
        for number, fault in enumerate(["layout", "none", "layout", "none"]):
            for sock in socks[: 5 * number + 5]:  # the others have not said a word
                assert api_versions(sock)
            upgrade(broker, newcomer(broker, f"9.{number}", fault))
            # Told of the last one too, so not of any end.
            wait_until(lambda v=f"9.{number}": identity(broker).get("version") == v)
            assert wait_for_end(broker, "done", "failed").endswith(f"to 9.{number}")
        for sock in socks:
            assert api_versions(sock)


def test_a_keeper_that_dies_before_it_has_handed_over_takes_nobody_along(
    broker, tmp_path
):
    killed = tmp_path / "killed"
    with ExitStack() as stack:
        socks = [stack.enter_context(dial(broker)) for _ in range(4)]
        for sock in socks:
            assert api_versions(sock)
        upgrade(broker, newcomer(broker, "9.9", f"layout+late={killed}"))
        wait_until(lambda: "mpbroker: leave" in broker.processes().values())
        kill(broker, "keeper")  # while the newcomer starts: nobody can replace it now
        killed.touch()
        said = wait_for_end(broker, "done", "failed, and was undone")
        why = "the keeper does not send its sockets: it has died"
        assert said == f"failed, and was undone: {why}"
        for sock in socks:
            assert api_versions(sock)


def test_a_keeper_that_dies_with_a_newcomer_takes_nobody_along(broker):
    with ExitStack() as stack:
        socks = [stack.enter_context(dial(broker)) for _ in range(4)]
        for sock in socks:
            assert api_versions(sock)
        said = change_generation(broker, "9.9", "takeover", "keeper")
        assert "cannot take over" in said
        for sock in socks:
            assert api_versions(sock)


def test_idle_connections_and_parts_of_frames_go_along(broker):
    cuts = [0, 2, 4, 100, 9_000, 12_000, 14_000, 400_000, 900_000]
    with ExitStack() as stack:
        socks = [stack.enter_context(dial(broker)) for _ in cuts]
        frames = []
        for number, (sock, cut) in enumerate(zip(socks, cuts, strict=True)):
            payload = bytes([number]) * (1_000_000 if cut > 12_000 else 12_500)
            frames.append(frame(ApiKey.PRODUCE, 9, produce_body(payload), number))
            assert api_versions(sock)
            sock.sendall(frames[-1][:cut])
        assert change_generation(broker).startswith("done")
        for sock, data, cut in zip(socks, frames, cuts, strict=True):
            sock.sendall(data[cut:])
            assert receive_frame(sock)
    broker.stop()
    values = read_log(broker.data_dir).values()
    assert sorted({value[0] for value in values}) == list(range(len(cuts)))
    assert len(values) == len(cuts)


def test_a_request_behind_one_that_waits_goes_along(broker):
    with dial(broker) as sock, dial(broker) as producer:
        second = frame(ApiKey.API_VERSIONS, 0, b"", 8)
        sock.sendall(frame(ApiKey.FETCH, 11, fetch_body(20_000), 7) + second[:9])
        api_versions(producer)
        assert change_generation(broker).startswith("done")
        sock.sendall(second[9:])
        ask(producer, ApiKey.PRODUCE, 9, produce_body(b"at last"))
        assert receive_frame_of(sock, 7) and receive_frame_of(sock, 8)


def receive_frame_of(sock, correlation_id):
    size = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "big")
    answer = sock.recv(size, socket.MSG_WAITALL)
    assert answer[:4] == correlation_id.to_bytes(4, "big")
    return answer


def test_half_an_answer_to_a_slow_reader_goes_along(broker):
    payload = os.urandom(LARGE)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 * 1024)
        sock.settimeout(90)
        host, _, port = broker.bootstrap.rpartition(":")
        sock.connect((host, int(port)))
        ask(sock, ApiKey.PRODUCE, 9, produce_body(payload))
        sock.sendall(frame(ApiKey.FETCH, 11, fetch_body(0), 3))
        data = sock.recv(1 << 16)
        assert change_generation(broker).startswith("done")
        data = receive_rest(sock, data, 2_000_000)
        assert change_generation(broker, "9.10").startswith("done")
        data = receive_rest(sock, data, 4 + int.from_bytes(data[:4], "big"))
        (topic,) = FetchResponse.decode(11, memoryview(data)[8:]).responses
        (record,) = iter_records(memoryview(topic.partitions[0].records))
        assert record.value == payload
        assert api_versions(sock)


@pytest.mark.parametrize("fault", ["takeover", "handler"])
def test_one_that_fails_later_is_undone_and_nobody_notices(broker, fault):
    version = identity(broker)["version"]
    with Load(broker, 8) as load:
        upgrade(broker, newcomer(broker, "9.9", f"layout+{fault}"))
        while not identity(broker).get("upgrade", "").startswith("failed"):
            load.run(20)
        wait_for_end(broker, "failed, and was undone")
        load.run(50)
    assert sum(load.losses) == 0
    assert identity(broker)["version"] == version
    broker.stop()
    load.verify(read_log(broker.data_dir))


def test_one_that_is_undone_leaves_a_metadata_log_of_dead_records_as_it_was(broker):
    create_topic(broker, "many", 1000)
    request = DeleteTopicsRequest(topic_names=["many"], timeout_ms=60_000)
    with dial(broker) as sock:
        ask(sock, ApiKey.DELETE_TOPICS, 5, request.encode(5))
    create_topic(broker, "behind")
    ended = change_generation(broker, "9.9", "takeover")
    assert ended.startswith("failed, and was undone")
    create_topic(broker, "more")
    with dial(broker) as sock:
        ask(sock, ApiKey.PRODUCE, 9, produce_body(b"as ever"))
    broker.stop()
    assert len(read_log(broker.data_dir)) == 1


def test_levels_of_loggers_go_along(broker):
    logger = "mpbroker.network.connections"
    answer = alter(broker, {logger: "DEBUG"}, resource_type=LOGGER_RESOURCE)
    assert answer.error_code == 0, answer

    def lines_since(began: int) -> list[str]:
        return broker.log_path.read_text()[began:].splitlines()

    def wait_for_a_line_of_a_connection() -> None:
        """It is of the level DEBUG; the default is INFO."""
        began = len(broker.log_path.read_text())
        with dial(broker) as sock:
            api_versions(sock)
            words = (logger, f"-127.0.0.1:{sock.getsockname()[1]}-", "connected")
            wait_until(
                lambda: [x for x in lines_since(began) if all(w in x for w in words)]
            )

    wait_for_a_line_of_a_connection()
    for number, fault in enumerate(["layout", "none"]):
        upgrade(broker, newcomer(broker, f"9.{number}", fault))
        wait_until(lambda v=f"9.{number}": identity(broker).get("version") == v)
        assert wait_for_end(broker, "done", "failed").endswith(f"to 9.{number}")
        wait_for_a_line_of_a_connection()


def test_another_largest_request_is_a_new_generation_too(broker):
    with dial(broker) as sock:
        assert api_versions(sock)
        command = [*newcomer(broker), "socket.request.max.bytes=50000000"]
        upgrade(broker, command)
        assert wait_for_end(broker, "done", "failed").startswith("done")
        assert api_versions(sock)


def test_the_metrics_stay_where_they_are(make_broker):
    broker = make_broker({**SETTINGS, "metrics.listeners": "HTTP://127.0.0.1:0"})
    where = identity(broker)["metrics"]
    assert change_generation(broker).startswith("done")
    assert identity(broker)["metrics"] == where
    with urllib.request.urlopen(f"{where}metrics", timeout=60) as answer:
        assert answer.status == 200


def test_nothing_is_left_of_the_generation_before(broker):
    wait_until(lambda: not holdings(broker)["rows"])
    before = holdings(broker)
    old = set(children(broker).values())
    with dial(broker) as sock:
        for number, fault in enumerate(["layout", "none"]):
            upgrade(broker, newcomer(broker, f"9.{number}", fault))
            wait_until(lambda v=f"9.{number}": identity(broker).get("version") == v)
            wait_for_end(broker, "done")
            assert api_versions(sock)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in old)

    def kept():
        now = holdings(broker)
        return all(now[kind] == before[kind] for kind in ("descriptors", "rows"))

    wait_until(kept)


class NoSockets:
    """A supervisor without connections."""

    sockets_kept = ()


def test_a_log_whose_last_sync_is_in_doubt_is_to_be_checked(tmp_path):
    """Its owner was killed, and may have been told of a failed write."""
    with broker_memory() as memory:
        topics = start(tmp_path, hooks=RegistryHooks(rows=memory.table))
        topics.create_topic("t", 4)
        whole, dropped, killed, synced = map(memory.table.row, range(4))
        for row in (whole, dropped, killed, synced):
            row.publish(LogState(log_end_offset=7))
            row.status = RowStatus.ONLINE
        for row, process in ((dropped, COORDINATOR), (killed, HOUSEKEEPER)):
            assert row.begin_sync(process) == 7
        dropped.forget_sync(COORDINATOR)
        assert synced.begin_sync(0) == 7
        synced.end_sync(7)
        leaver = Leaver(NoSockets(), memory, topics, by_force=False)
        assert [log[1:] for log in leaver._logs()] == [
            (0, 0, 7),
            (1, 0, 0),
            (2, 0, 0),
            (3, 0, 7),
        ]
