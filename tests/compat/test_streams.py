"""Kafka Streams with the group protocol of its own (KIP-1071), and Kafka's tool."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import pytest

from tests.support.apache_kafka import java_command
from tests.support.children import wait_until
from tests.support.fetch_clients import have_java_clients
from tests.support.streams_application import PARTITIONS, TIMEOUT_S, word_count

MakeTopic = Callable[..., str]

pytestmark = [
    pytest.mark.skipif(
        not have_java_clients(),
        reason="no Kafka Streams in .downloads/java: scripts/test fetches it",
    ),
    pytest.mark.timeout(600),
]


def streams_groups(bootstrap: str, *arguments: str) -> str:
    """Return what kafka-streams-groups prints."""
    main_class = "org.apache.kafka.tools.streams.StreamsGroupCommand"
    done = subprocess.run(
        java_command(main_class, "--bootstrap-server", bootstrap, *arguments),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_two_instances_count_words_exactly_once(
    bootstrap: str, make_topic: MakeTopic
) -> None:
    names = (f"of-{make_topic()}", make_topic(PARTITIONS), make_topic(PARTITIONS))
    application = names[0]
    with word_count(bootstrap, names) as count:
        count.write(100)
        count.instances[0].wait_until_running()
        second = count.start()
        second.wait_until_running()
        count.write(100)

        def is_shared() -> bool:
            lines = streams_groups(
                bootstrap, "--describe", "--group", application, "--members"
            ).splitlines()
            tasks = [line for line in lines if re.search(r"ACTIVE", line)]
            return len(tasks) == 2

        wait_until(is_shared, TIMEOUT_S)
        listed = streams_groups(bootstrap, "--list", "--state")
        assert re.search(rf"{application}\s+Stable", listed)
        second.stop()
        count.write(100)
        every = count.read_all()
        # Each count once and in order: nothing was counted twice, or lost.
        for word, written in count.written.items():
            assert [n for each, n in every if each == word][-1] == written
        count.instances[0].stop()
    wait_until(
        lambda: bool(
            re.search(
                rf"{application}\s+Empty",
                streams_groups(bootstrap, "--list", "--state"),
            )
        ),
        TIMEOUT_S,
    )
    deleted = streams_groups(bootstrap, "--delete", "--group", application)
    assert "successful" in deleted
