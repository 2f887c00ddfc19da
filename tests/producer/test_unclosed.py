"""Producers that nobody closes: nothing is lost in silence, and no thread stays."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
from contextlib import suppress

import pytest

from mpbroker.producer import Producer
from tests.support.children import wait_until
from tests.support.patience import LONGEST_S


def test_a_dropped_producer_sends_what_it_has_and_ends_its_thread(bootstrap, new_topic):
    topic = new_topic()
    producers = [
        Producer(bootstrap_servers=bootstrap, linger_ms=600_000, client_id="me")
    ]
    thread = producers[0]._thread
    future = producers[0].send(topic, b"x")
    with pytest.warns(ResourceWarning, match=r"unclosed producer me: .* 1 record\(s\)"):
        producers.clear()
    assert future.result(LONGEST_S).offset == 0
    thread.join(LONGEST_S)
    assert not thread.is_alive()


def test_a_producer_that_is_used_for_one_expression_sends_its_record(
    bootstrap, new_topic
):
    topic = new_topic()
    with pytest.warns(ResourceWarning):
        future = Producer(bootstrap_servers=bootstrap).send(topic, b"x")
    assert future.result(LONGEST_S).offset == 0


def test_a_program_that_ends_without_closing_is_told_what_it_loses(
    bootstrap, new_topic
):
    topic = new_topic()
    program = f"""if True:
        from mpbroker.producer import Producer
        producer = Producer(bootstrap_servers={bootstrap!r}, linger_ms=600_000)
        for _ in range(3):
            producer.send({topic!r}, b"x", partition=0)
        closed = Producer(bootstrap_servers={bootstrap!r})
        closed.close()
    """
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "3 record(s) that were not acknowledged may be lost" in ended.stderr
    assert ended.stderr.count("unclosed producer") == 1
    ended = subprocess.run(
        [sys.executable, "-W", "always", "-c", program.replace("range(3)", "range(0)")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr.count("ResourceWarning: unclosed producer") == 1


def test_a_constructor_that_is_interrupted_leaves_no_thread(monkeypatch):
    def names():
        return [t.name for t in threading.enumerate() if t.name.endswith("| cut off")]

    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.warns(ResourceWarning), suppress(KeyboardInterrupt):
        Producer(bootstrap_servers="127.0.0.1:1", client_id="cut off")
    wait_until(lambda: not names())


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_childs_copy_is_dropped_without_a_word(bootstrap, new_topic):
    topic = new_topic()
    producers = [Producer(bootstrap_servers=bootstrap, linger_ms=600_000)]
    future = producers[0].send(topic, b"parent's", partition=0)
    pid = os.fork()
    if not pid:
        said = 1
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                producers.clear()
                gc.collect()
            said = len(told)
        finally:
            os._exit(said)
    assert os.waitpid(pid, 0)[1] == 0
    assert not future.done()
    producers[0].close()
    assert future.result(0).offset == 0
