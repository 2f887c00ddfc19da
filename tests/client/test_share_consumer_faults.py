"""`ShareConsumer` whose broker restarts, forgets it, or answers what it should not."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext

import pytest

from mpbroker import (
    AcknowledgeType,
    ApiError,
    BrokerUnavailableError,
    ClientError,
    ErrorCode,
    ShareConsumer,
    TopicPartition,
)
from mpbroker.client.addresses import parse_addresses
from mpbroker.client.admin.group_admin import share_offsets
from mpbroker.client.cluster import Cluster
from mpbroker.client.consumer.consumer_record import ConsumerRecord
from mpbroker.client.share.share_session import (
    ShareFetchSettings,
    SharePlace,
    ShareSession,
)
from mpbroker.protocol.messages.share_fetch import ForgottenTopic
from mpbroker.protocol.messages.share_group_heartbeat import (
    ShareGroupHeartbeatResponse,
)
from tests.client.test_consumer import fill
from tests.client.test_share_consumer import begin_at_the_start, errors, poll, values
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.patience import LONGEST_S
from tests.support.ports import reusable_port

GROUP, TOPIC = "queue", "t"
WHERE = TopicPartition(TOPIC, 0)
A, B = SharePlace(b"a" * 16, WHERE), SharePlace(b"b" * 16, WHERE)


@pytest.fixture
def served(make_broker: Callable[..., Broker]) -> Broker:
    """A broker of the test's own, with ten records and a group that reads them."""
    port = reusable_port()  # each time it is started
    broker = make_broker({"listeners": f"PLAINTEXT://127.0.0.1:{port}"})
    fill(broker.bootstrap, TOPIC, range(10))
    begin_at_the_start(broker.bootstrap, GROUP)
    return broker


def consumer_of(broker: Broker, **settings: object) -> ShareConsumer:
    consumer = ShareConsumer(
        bootstrap_servers=broker.bootstrap, group_id=GROUP, **settings
    )
    consumer.subscribe([TOPIC])
    return consumer


def patient_poll(consumer: ShareConsumer, count: int) -> list[ConsumerRecord]:
    found: list[list[ConsumerRecord]] = []

    def has_found() -> bool:
        try:
            found.extend([poll(consumer, count)])
        except BrokerUnavailableError:
            return False
        return True

    wait_until(has_found)
    return found[0]


def test_a_restart_of_the_broker_loses_no_record_and_no_member(served):
    with consumer_of(served, share_acknowledgement_mode="explicit") as consumer:
        first, *others = poll(consumer, 10)
        consumer.acknowledge(first)
        assert errors(consumer.commit_sync()) == [None]
        served.kill()
        served.start()
        for record in others:
            consumer.acknowledge(record)
        failed = consumer.commit_sync()
        assert list(failed) == [WHERE]
        assert failed[WHERE] is not None
        # Its session has ended with the connection, so the others come again.
        again = patient_poll(consumer, 9)
        assert values(again) == list(range(1, 10))
        for record in again:
            consumer.acknowledge(record)
        assert errors(consumer.commit_sync()) == [None]
        assert consumer.poll(100) == {}


def test_a_partition_that_no_process_has_opened_since_the_start_is_not_empty(served):
    served.stop()
    served.start()
    with (
        ShareConsumer(bootstrap_servers=served.bootstrap, group_id="late") as consumer,
        Cluster(parse_addresses(served.bootstrap), timeout_s=LONGEST_S) as cluster,
    ):
        consumer.subscribe([TOPIC])

        def began_at() -> int | None:
            assert consumer.poll(200) == {}
            state = share_offsets(cluster, "late").get(WHERE)
            return state and state.start_offset

        # A group begins at the end, unless its settings say something else.
        assert wait_until(lambda: [at for at in [began_at()] if at is not None]) == [10]


def test_while_the_broker_is_away_a_poll_says_so_at_its_end(served):
    with consumer_of(served) as consumer:
        poll(consumer, 10)
        consumer.commit_sync()
        served.kill()
        with pytest.raises(BrokerUnavailableError):
            consumer.poll(300)
        served.start()
        fill(served.bootstrap, TOPIC, range(10, 11))
        assert values(patient_poll(consumer, 1)) == [10]


def test_a_member_that_the_group_has_forgotten_joins_again(served):
    with consumer_of(served) as consumer:
        poll(consumer, 10)
        consumer.commit_sync()
        member = consumer._member
        with member._lock:
            refusal = ShareGroupHeartbeatResponse(
                error_code=ErrorCode.UNKNOWN_MEMBER_ID
            )
            member._take(refusal, [TOPIC])
        assert not member.is_member
        fill(served.bootstrap, TOPIC, range(10, 11))
        assert values(poll(consumer)) == [10]
        assert member.is_member


def test_a_member_that_does_not_poll_leaves_and_comes_back(served):
    with consumer_of(served, max_poll_interval_ms=1) as idle:
        poll(idle, 10)
        idle.commit_sync()
        idle._member._interval_s = 0.01
        wait_until(lambda: not idle._member.is_member)
        fill(served.bootstrap, TOPIC, range(10, 11))
        assert values(poll(idle)) == [10]


def test_a_refused_group_is_an_error_of_poll_and_not_for_ever(served):
    with consumer_of(served) as consumer:
        poll(consumer, 10)
        consumer._member._fatal = ApiError(ErrorCode.GROUP_AUTHORIZATION_FAILED, "no")
        with pytest.raises(ApiError, match="no"):
            consumer.poll(0)
        assert consumer.poll(0) == {}


def test_a_child_of_a_fork_cannot_use_it(served):
    with consumer_of(served) as consumer:
        poll(consumer, 10)
        pid = os.fork()
        if not pid:
            try:
                consumer.close()  # does nothing
                consumer.poll(0)
            except ClientError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        assert consumer.commit_sync() == {WHERE: None}
    with pytest.raises(ClientError, match="closed"):
        consumer.poll(0)
    consumer.close()


def test_a_session_names_only_what_changes_and_what_is_acknowledged():
    session = ShareSession(GROUP, "m")
    first = session.fetch([A, B], {}, ShareFetchSettings(), 500)
    assert first.share_session_epoch == 0
    assert [topic.topic_id for topic in first.topics] == [A.topic_id, B.topic_id]
    session.answered()
    again = session.fetch([A, B], {}, ShareFetchSettings(), 500)
    assert (again.share_session_epoch, again.topics) == (1, [])
    session.answered()
    kinds = AcknowledgeType
    for offset, kind in ((0, kinds.ACCEPT), (2, kinds.ACCEPT), (1, kinds.ACCEPT)):
        session.give(B, offset, kind)
    session.give(B, 3, kinds.GAP)
    session.give(B, 5, kinds.GAP)
    given = session.take_given()
    last = session.fetch([A], given, ShareFetchSettings(), 500)
    assert last.share_session_epoch == 2
    (topic,) = last.topics
    assert topic.topic_id == B.topic_id
    assert [
        (each.first_offset, each.last_offset, each.acknowledge_types)
        for each in topic.partitions[0].acknowledgement_batches
    ] == [(0, 2, [1]), (3, 3, [0]), (5, 5, [0])]
    assert last.forgotten_topics_data == [
        ForgottenTopic(topic_id=B.topic_id, partitions=[0])
    ]
    assert session.acknowledge({}, ends=True).share_session_epoch == -1


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_silent_broker_is_waited_for_no_longer_than_close_was_told(
    served, monkeypatch, is_interrupted
):
    """For all requests together: acknowledgements, sessions, the group."""
    consumer = consumer_of(served)
    poll(consumer, 10)
    member = consumer._member
    limits_ms: list[float] = []
    for cluster in (consumer._cluster, member._coordinator._cluster):
        client = cluster.client
        monkeypatch.setattr(client, "send", lambda *arguments, **options: None)

        def noting(wait_ms, now_ms, client=client, wait=client.poll):
            if wait_ms > 0 and member._stop.is_set():
                limits_ms.append(now_ms + wait_ms)
                if is_interrupted and client is consumer._cluster.client:
                    limits_ms.clear()
                    raise KeyboardInterrupt
            return wait(wait_ms, now_ms)

        monkeypatch.setattr(client, "poll", noting)
    with pytest.raises(KeyboardInterrupt) if is_interrupted else nullcontext():
        consumer.close(timeout=0.5)
    assert limits_ms or is_interrupted
    # After an interruption nothing is waited for.
    end_ms = member._coordinator._cluster.end_by_ms
    assert [limit_ms for limit_ms in limits_ms if limit_ms > end_ms + 1] == []
    assert member._heart is not None and not member._heart.is_alive()
