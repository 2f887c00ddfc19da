"""The housekeeper replaces a long metadata log, and all processes go on behind it."""

from __future__ import annotations

from pathlib import Path

from tests.bench import wire
from tests.broker.load import Load, children, create_topic, kill, read_log
from tests.broker.resizing import resize, wait_for_sizes
from tests.faults.test_kill_the_whole_tree import address_of
from tests.support.broker import Broker
from tests.support.children import wait_until

SETTINGS = {
    "num.io.threads": 2,
    "num.network.threads": 1,
    "log.initial.task.delay.ms": 0,
    "auto.create.topics.enable": "false",
}


def snapshots(broker: Broker) -> list[Path]:
    folder = Path(str(broker.config["log.dirs"])) / "__cluster_metadata-0"
    return sorted(folder.glob("*.checkpoint"))


def fill(connection: wire.Connection, name: str) -> None:
    batch = wire.record_batch([wire.RecordSpec(name.encode())])
    answer = connection.ask(wire.produce(name, 0, batch, -1))
    assert wire.parse_produce(answer).error_code == 0


def values(connection: wire.Connection, name: str) -> list[bytes | None]:
    return [each.value for each in connection.read_all(name, 0)]


def test_a_log_of_deleted_partitions_is_replaced_and_all_go_on(make_broker) -> None:
    broker = make_broker(SETTINGS)
    create_topic(broker)
    with (
        Load(broker, 2, acks=-1) as load,
        wire.Connection(address_of(broker)) as connection,
    ):
        connection.create_topic("before", 3)
        fill(connection, "before")
        for number in range(3):
            connection.create_topic(f"many-{number}", 9000)
            connection.delete_topic(f"many-{number}")
        assert not snapshots(broker)
        housekeeper = children(broker)["housekeeper", 0]
        kill(broker, "housekeeper", 0)  # its successor looks at the log at once
        wait_until(lambda: snapshots(broker))
        assert children(broker)["housekeeper", 0] != housekeeper
        connection.create_topic("behind", 3)  # by a handler that read the records
        fill(connection, "behind")
        for slot in range(2):
            kill(broker, "handler", slot)
        kill(broker, "coordinator", 0)
        resize(broker, handlers=3)
        wait_for_sizes(broker, 3, 1)
        load.run(20)
        connection.create_topic("later", 3)  # or by one that read the snapshot
        fill(connection, "later")
        for name in ("before", "behind", "later"):
            assert values(connection, name) == [name.encode()]
    broker.stop()
    load.verify(read_log(broker.data_dir))
    assert len(snapshots(broker)) == 1
    broker.start()
    with wire.Connection(address_of(broker)) as connection:
        for name in ("before", "behind", "later"):
            assert values(connection, name) == [name.encode()]
