"""Where a `NetworkClient` learns of brokers, and where else if it learns nothing."""

from __future__ import annotations

import pytest

from mpbroker.client.addresses import Address
from mpbroker.client.errors import UnsupportedVersionError
from mpbroker.client.metadata import Metadata
from mpbroker.client.network_client import NetworkClient
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.framing import encode_frame
from mpbroker.protocol.headers import encode_response_header
from mpbroker.protocol.messages.init_producer_id import InitProducerIdResponse
from mpbroker.protocol.messages.metadata import (
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from tests.client.test_network_client import Rig


def test_all_bootstrap_addresses_are_tried_until_one_answers():
    rig = Rig(connect=False)
    rig.settings = rig.settings._replace(
        bootstrap=tuple(Address(f"boot{i}", 9092) for i in range(3))
    )
    client = NetworkClient(
        rig.wire, rig.metadata, rig.settings, rig.resolve, rig.wire.clock
    )
    rig.wire.refuse_connect |= {-1, -2}
    for _ in range(12):
        client.poll(0, rig.wire.now_ms)
        rig.pass_ms(20)
    assert rig.metadata.snapshot.nodes


def test_when_every_broker_is_gone_the_bootstrap_addresses_are_tried_again():
    rig = Rig()
    rig.wire.refuse_connect |= {0, 1}
    rig.wire.hang_up(0)
    rig.turns()
    before = len(rig.wire.connects)
    for _ in range(60):
        rig.turns()
        rig.pass_ms(100)
    assert -1 in [node for node, _ in rig.wire.connects[before:]]
    rig.wire.nodes = {5: Address("b5", 9092)}
    rig.metadata.request_update()
    for _ in range(60):
        rig.turns()
        rig.pass_ms(100)
    assert set(rig.metadata.snapshot.nodes) == {5}


def test_without_metadata_for_too_long_the_bootstrap_addresses_are_asked_again():
    rig = Rig(metadata_recovery_rebootstrap_trigger_ms=5000, request_timeout_ms=1000)
    rig.connect(1)
    rig.wire.nodes = {7: Address("b7", 9092)}
    before = len(rig.wire.connects)
    rig.wire.silent.add(ApiKey.METADATA)  # connections are fine, but of no use
    rig.metadata.request_update()
    waited_ms = 0
    while -1 not in [node for node, _ in rig.wire.connects[before:]]:
        rig.turns()
        rig.pass_ms(100)
        waited_ms += 100
        assert waited_ms < 20_000
    assert waited_ms > 5000
    rig.wire.silent.clear()
    for _ in range(60):
        rig.turns()
        rig.pass_ms(100)
    assert set(rig.metadata.snapshot.nodes) == {7}


def test_what_is_in_flight_while_bootstrapping_again_is_lost_and_told():
    rig = Rig(metadata_recovery_rebootstrap_trigger_ms=5000, request_timeout_ms=60_000)
    rig.wire.silent.add(ApiKey.METADATA)
    rig.metadata.request_update()
    rig.pass_ms(1000)  # past the backoff
    rig.turns(2)
    rig.pass_ms(4000)
    rig.send()
    rig.pass_ms(4000)
    rig.turns(2)
    (answer,) = rig.answers
    assert answer.disconnected
    assert "bootstrapping again" in str(answer.error)


def test_metadata_that_came_while_nobody_looked_is_not_too_late():
    """Whoever takes minutes for its records leaves answers where they are."""
    rig = Rig(metadata_recovery_rebootstrap_trigger_ms=5000, request_timeout_ms=60_000)
    rig.wire.silent.add(ApiKey.METADATA)
    rig.metadata.request_update()
    rig.pass_ms(1000)  # past the backoff
    rig.turns(2)
    (asked,) = rig.wire.waiting(ApiKey.METADATA)
    rig.wire.answer(rig.wire.metadata(asked.request), asked)
    rig.send()
    rig.pass_ms(6000)
    rig.turns(2)
    assert rig.metadata.updated_ms == rig.wire.now_ms
    assert rig.answers == [] and rig.client.in_flight(0) == 1


def test_the_strategy_none_never_goes_back_to_the_bootstrap_addresses():
    rig = Rig(
        rebootstrap=False,
        metadata_recovery_rebootstrap_trigger_ms=1000,
        request_timeout_ms=500,
    )
    rig.wire.silent.add(ApiKey.METADATA)
    before = len(rig.wire.connects)
    for _ in range(100):
        rig.metadata.request_update()
        rig.turns()
        rig.pass_ms(100)
    assert -1 not in [node for node, _ in rig.wire.connects[before:]]


def test_a_broker_without_metadata_requests_is_an_error_and_not_an_endless_wait():
    rig = Rig(connect=False)
    rig.wire.versions[ApiKey.METADATA] = (100, 101)
    rig.turns(8)
    with pytest.raises(UnsupportedVersionError, match="METADATA"):
        rig.metadata.wait(rig.metadata.request_update(), 30)


def test_answers_behind_the_word_to_bootstrap_again_are_lost_and_told():
    rig = Rig(request_timeout_ms=60_000)
    rig.wire.silent.add(ApiKey.METADATA)
    rig.metadata.request_update()
    rig.pass_ms(1000)  # past the backoff
    rig.turns(2)
    (asked,) = rig.wire.waiting(ApiKey.METADATA)
    rig.send()
    (sent,) = rig.wire.waiting(ApiKey.INIT_PRODUCER_ID)
    answer = MetadataResponse(error_code=ErrorCode.REBOOTSTRAP_REQUIRED)
    both = b"".join(
        encode_frame(
            [
                encode_response_header(each.key, each.version, each.correlation_id),
                response.encode(each.version),
            ]
        )
        for each, response in ((asked, answer), (sent, InitProducerIdResponse()))
    )
    rig.wire.raw(asked.node, both)
    rig.turns()
    (lost,) = rig.answers
    assert lost.disconnected


def learner():
    metadata = Metadata()

    def learn(topic_id, leader, epoch):
        partition = MetadataResponsePartition(leader_id=leader, leader_epoch=epoch)
        topic = MetadataResponseTopic(
            name="t", topic_id=bytes([topic_id] * 16), partitions=[partition]
        )
        nodes = [
            MetadataResponseBroker(node_id=node, host="h", port=9) for node in (0, 1)
        ]
        metadata.update(MetadataResponse(brokers=nodes, topics=[topic]), 0)
        return metadata.snapshot.leader("t", 0)

    return learn


def test_a_topic_that_was_made_again_begins_again_with_its_leaders_epochs():
    learn = learner()
    assert learn(1, leader=0, epoch=5) == 0
    assert learn(1, leader=1, epoch=4) == 0  # from a broker that has not heard yet
    assert learn(2, leader=1, epoch=0) == 1
    assert learn(0, leader=1, epoch=3) == 1  # an older broker: it tells no ids
    assert learn(2, leader=0, epoch=2) == 1


def test_a_topic_that_gets_an_id_begins_again_with_its_leaders_epochs():
    learn = learner()
    assert learn(0, leader=0, epoch=5) == 0
    assert learn(1, leader=1, epoch=0) == 1
