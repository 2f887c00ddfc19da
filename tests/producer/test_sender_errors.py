"""What an error costs: a record, or the whole producer; and how closing ends then."""

from __future__ import annotations

import threading

import pytest

from mpbroker.producer import FatalError, Producer, ProducerClosedError, RefusedError
from mpbroker.producer.batch import ProducerBatch
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from tests.client.fake_broker import FakeBroker
from tests.producer.rig import SenderRig
from tests.producer.test_transactions import TransactionRig


def run_to_the_end(rig: SenderRig) -> None:
    """Run the sender as its thread does; it must end by itself."""
    thread = threading.Thread(target=rig.sender.run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert rig.wire.is_shut_down


def test_a_format_the_topic_cannot_hold_fails_the_record_and_not_the_producer():
    rig = SenderRig().ready().introduce()
    future = rig.send()
    rig.reply(code=ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT)
    assert isinstance(future.exception(0), RefusedError)
    rig.turns(2)
    after = rig.send()
    rig.reply()
    assert after.exception(0) is None


@pytest.mark.parametrize(
    "code", [ErrorCode.UNSUPPORTED_VERSION, ErrorCode.CLUSTER_AUTHORIZATION_FAILED]
)
def test_a_fatal_refusal_fails_what_comes_after_and_leaves_what_is_on_its_way(code):
    rig = SenderRig().ready().introduce()
    first, second = rig.send(b"1"), rig.send(b"2")
    sent = rig.produces
    rig.reply(sent[0], code=code)
    assert isinstance(first.exception(0), FatalError)
    assert not second.done()
    rig.reply(sent[1])
    assert second.exception(0) is None  # written, whatever became of the other
    later = rig.append(b"3")
    rig.turns(2)
    assert isinstance(later.exception(0), FatalError)
    assert not rig.produces


def test_closing_ends_although_another_id_is_waited_for():
    rig = SenderRig().ready().introduce()
    rig.state.epoch = 32767
    future = rig.send(b"x")
    rig.wire.silent.add(ApiKey.INIT_PRODUCER_ID)
    rig.reply(code=ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER)
    rig.turns(2)
    assert not rig.state.has_producer_id
    assert not future.done()
    rig.sender.force_close()
    run_to_the_end(rig)
    error = future.exception(0)
    assert isinstance(error, ProducerClosedError)
    assert "may be written" in str(error)


def test_closing_ends_although_the_producer_is_of_no_use_any_more():
    rig = SenderRig().ready().introduce()
    future = rig.send(b"x")
    rig.reply(code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    waiting = rig.append(b"y")
    rig.sender.close()
    run_to_the_end(rig)
    assert isinstance(future.exception(0), FatalError)
    assert isinstance(waiting.exception(0), FatalError)


def test_closing_a_transactional_producer_ends_although_it_is_of_no_use_any_more():
    rig = TransactionRig()
    future = rig.append()
    rig.turns(2)
    rig.added(ErrorCode.PRODUCER_FENCED)
    rig.sender.close()
    run_to_the_end(rig)
    assert isinstance(future.exception(0), FatalError)
    assert not [s for s in rig.wire.all_sent if s.key == ApiKey.END_TXN]


def test_a_topic_nobody_sends_to_is_forgotten_and_learnt_again():
    rig = SenderRig(metadata_max_idle_ms=5000, metadata_max_age_ms=1000)
    rig.metadata._topic_max_idle_ms = rig.settings.metadata_max_idle_ms
    rig.ready()
    assert "t" in rig.metadata.topics
    for _ in range(10):
        rig.pass_ms(1000)
        rig.metadata.request_update()
        rig.turns(3)
    assert "t" not in rig.metadata.topics
    assert "t" not in rig.metadata.snapshot.topics
    rig.metadata.add_topic("t", rig.wire.now_ms)  # as send() does
    rig.turns(4)
    rig.send()
    rig.reply()
    assert "t" in rig.metadata.snapshot.topics


def test_a_flush_that_is_interrupted_leaves_lingering_as_it_was(monkeypatch):
    broker = FakeBroker({"t": 1})
    try:
        with Producer(
            bootstrap_servers=str(broker.address), linger_ms=60_000
        ) as producer:
            producer.send("t", b"x")

            def interrupted(batch: ProducerBatch, timeout_s: float | None) -> bool:
                raise KeyboardInterrupt

            with monkeypatch.context() as patched:
                patched.setattr(ProducerBatch, "wait", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    producer.flush()
            assert not producer._accumulator.flushes
            producer.close(0)
    finally:
        broker.close()
