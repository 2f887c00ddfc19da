"""Brokers on one machine: they do not meet, and leave nothing to each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.bench import wire
from tests.faults.test_kill_the_whole_tree import address_of
from tests.faults.test_start_refused import expect_one_line, refusal
from tests.support.broker import Broker
from tests.support.footprint import Footprint


def topics_of(broker: Broker) -> bytes:
    with wire.Connection(address_of(broker)) as connection:
        return connection.ask(wire.metadata(None))


def test_two_brokers_do_not_meet(make_broker: Callable[..., Broker]) -> None:
    one, two = make_broker(name="one"), make_broker(name="two")
    assert one.bootstrap != two.bootstrap
    with wire.Connection(address_of(one)) as connection:
        connection.create_topic("only-here")
    assert b"only-here" in topics_of(one)
    assert b"only-here" not in topics_of(two)
    held = [Footprint.of_session(broker.pid) for broker in (one, two)]
    assert not held[0].shared_memory & held[1].shared_memory
    assert not held[0].socket_files & held[1].socket_files
    two.stop()
    assert b"only-here" in topics_of(one)


def test_a_data_directory_in_use_is_refused(
    make_broker: Callable[..., Broker],
) -> None:
    broker = make_broker()
    code, said = refusal(
        {"listeners": "PLAINTEXT://127.0.0.1:0", "log.dirs": broker.data_dir}
    )
    expect_one_line(code, said, "log.dirs", str(broker.data_dir))
    topics_of(broker)


def test_what_a_killed_broker_left_is_cleaned_by_the_next(tmp_path: Path) -> None:
    broker = Broker(tmp_path / "data")
    broker.start()
    left = Footprint.of_session(broker.pid)
    broker.kill()
    broker.start()
    now = Footprint.of_session(broker.pid)
    stale = [
        name
        for name in left.left_behind()
        if name not in now.shared_memory | now.socket_files
    ]
    assert not stale
    broker.stop()  # which fails if anything is left


def test_leftovers_of_a_live_broker_are_not_touched(
    make_broker: Callable[..., Broker],
) -> None:
    first = make_broker(name="first")
    names = Footprint.of_session(first.pid).left_behind()
    make_broker(name="second").stop()
    assert Footprint.of_session(first.pid).left_behind() == names
