"""A consumer whose topic is gone, whose listener raises, or that is closed itself."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mpbroker.client.addresses import parse_addresses
from mpbroker.client.admin.group_admin import describe_group
from mpbroker.client.admin.topic_admin import delete_topic
from mpbroker.client.cluster import Cluster
from mpbroker.client.consumer.async_consumer import AsyncConsumer
from mpbroker.client.consumer.consumer import Consumer, RebalanceListener
from mpbroker.client.errors import ClientError
from mpbroker.client.selector import monotonic_ms
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from tests.client.test_consumer import fill, values


@pytest.fixture
def topic(bootstrap, topic_name):
    fill(bootstrap, topic_name, range(5))
    return topic_name


def joined(bootstrap, topic, listener=None, **settings):
    consumer = Consumer(
        bootstrap_servers=bootstrap,
        group_id=f"group-{topic}",
        auto_offset_reset="earliest",
        **(settings or {"heartbeat_interval_ms": 200}),
    )
    consumer.subscribe([topic], listener)
    while not consumer.poll(1000):
        pass
    return consumer


def assert_gone(bootstrap, topic):
    assert f"group-{topic}" not in " ".join(t.name for t in threading.enumerate())
    with Cluster(parse_addresses(bootstrap), 90) as cluster:
        try:
            members = describe_group(cluster, f"group-{topic}").members
        except ApiError as error:
            # Without members and positions, a broker may forget it at once.
            assert error.error_code is ErrorCode.GROUP_ID_NOT_FOUND
            members = []
    assert members == []


def test_a_topic_deleted_meanwhile_keeps_nobody_from_leaving(bootstrap, topic, caplog):
    consumer = joined(bootstrap, topic)
    with Cluster(parse_addresses(bootstrap), 90) as cluster:
        delete_topic(cluster, topic)
    consumer.close()
    assert "UNKNOWN_TOPIC_OR_PARTITION" in caplog.text
    assert_gone(bootstrap, topic)


def test_a_listener_that_raises_keeps_nobody_from_leaving(bootstrap, topic):
    class Listener(RebalanceListener):
        def on_partitions_revoked(self, partitions):
            raise ValueError("from the listener")

    consumer = joined(bootstrap, topic, Listener())
    with pytest.raises(ValueError, match="from the listener"):
        consumer.close()
    consumer.close()
    assert_gone(bootstrap, topic)


def test_what_is_asked_of_a_closed_consumer_is_refused(bootstrap, topic):
    consumer = joined(bootstrap, topic)
    consumer.close()
    for call in (
        consumer.poll,
        consumer.poll_batches,
        consumer.commit,
        lambda: consumer.committed((topic, 0)),
        lambda: consumer.subscribe([topic]),
        lambda: consumer.assign([(topic, 0)]),
        lambda: consumer.offsets_for([(topic, 0)], 0),
    ):
        with pytest.raises(ClientError, match="closed; make a new one"):
            call()


def test_the_record_whose_use_failed_is_read_again(bootstrap, topic):
    settings = {
        "bootstrap_servers": bootstrap,
        "group_id": f"group-{topic}",
        "auto_offset_reset": "earliest",
    }

    def fail_at_2():
        with Consumer(**settings) as consumer:
            consumer.subscribe([topic])
            for record in consumer:
                if record.offset == 2:
                    raise RuntimeError("at 2")

    with pytest.raises(RuntimeError, match="at 2"):
        fail_at_2()
    with Consumer(**settings) as consumer:
        assert consumer.committed((topic, 0)) == 2
        consumer.subscribe([topic])
        for record in consumer:
            assert record.offset == 2
            break
    with Consumer(**settings) as consumer:
        assert consumer.committed((topic, 0)) == 3  # done with: the loop was left


def test_a_partition_that_is_not_there_gives_nothing(bootstrap, topic):
    with Consumer(bootstrap_servers=bootstrap) as consumer:
        consumer.assign([(topic, 7)])
        assert consumer.poll(100) == {}


def test_a_topic_that_is_gone_keeps_no_other_one_unread(bootstrap, topic):
    other = f"{topic}-other"
    fill(bootstrap, other, range(5))
    with Consumer(
        bootstrap_servers=bootstrap,
        auto_offset_reset="earliest",
        allow_auto_create_topics=False,
    ) as consumer:
        with Cluster(parse_addresses(bootstrap), 90) as cluster:
            delete_topic(cluster, topic)
        consumer.assign([(topic, 0), (other, 0)])
        assert values(consumer, 5) == [0, 1, 2, 3, 4]
        fill(bootstrap, topic, range(3))
        assert values(consumer, 3) == [0, 1, 2]


# -- a broker that does not answer -----------------------------------------------------


def mute(consumer, monkeypatch):
    """Let none of a consumer's requests be answered from now on."""
    member = consumer._member
    for cluster in (consumer._cluster, member._cluster):
        client = cluster.client
        monkeypatch.setattr(client, "send", lambda *arguments, **options: None)
    return member


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_silent_broker_is_waited_for_no_longer_than_close_was_told(
    bootstrap, topic, monkeypatch, protocol
):
    consumer = joined(bootstrap, topic, group_protocol=protocol)
    member = mute(consumer, monkeypatch)
    waits = waits_of(member, monkeypatch)
    consumer.close(timeout=0.5)
    # For all requests together, not for each of them, and not for request.timeout.ms.
    assert waits
    assert max(waits) <= member._cluster.end_by_ms + 1
    assert f"group-{topic}" not in " ".join(t.name for t in threading.enumerate())


def waits_of(member, monkeypatch):
    """Note until when each wait of a member that ends would last, in ms."""
    client = member._cluster.client
    waits = []
    poll = client.poll

    def noting(wait_ms, now_ms):
        if wait_ms > 0 and member._is_ending:
            waits.append(now_ms + wait_ms)
        return poll(wait_ms, now_ms)

    monkeypatch.setattr(client, "poll", noting)
    return waits


def test_an_interrupted_close_waits_for_nothing_more(bootstrap, topic, monkeypatch):
    consumer = joined(bootstrap, topic)
    member = mute(consumer, monkeypatch)

    def interrupted(*, now=False):
        raise KeyboardInterrupt

    monkeypatch.setattr(consumer, "_auto_commit", interrupted)
    waits = waits_of(member, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        consumer.close()
    # No wait began after the one that was interrupted.
    assert [limit_ms for limit_ms in waits if limit_ms > monotonic_ms()] == []
    assert f"group-{topic}" not in " ".join(t.name for t in threading.enumerate())


def test_an_async_consumer_hands_its_timeout_on(bootstrap, topic, monkeypatch):
    given = []
    monkeypatch.setattr(Consumer, "close", lambda self, timeout: given.append(timeout))

    async def use():
        await AsyncConsumer(bootstrap_servers=bootstrap).close()
        await AsyncConsumer(bootstrap_servers=bootstrap).close(timeout=2)

    asyncio.run(use())
    assert given == [30, 2]
