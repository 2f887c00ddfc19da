"""Metadata finds each topic once, by its id if the request has one."""

import pytest

from mpbroker.metadata.topics import Topic
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from mpbroker.server.handlers.metadata import handle_metadata
from tests.server.contexts import context, fake_logs
from tests.support.metadata import start


class NoTopics:
    def topic(self, name: str) -> Topic | None:
        return None

    def topic_by_id(self, topic_id: bytes) -> Topic | None:
        return None

    def topics(self) -> list[Topic]:
        return []


def test_a_name_that_is_repeated_is_answered_once() -> None:
    request = MetadataRequest(
        topics=[MetadataRequestTopic(name=name) for name in "abaab"]
    )
    response = handle_metadata(request, context(NoTopics(), version=9))
    assert [topic.name for topic in response.topics] == ["a", "b"]


@pytest.mark.parametrize("version", [12, 13])
@pytest.mark.parametrize("name", [None, "", "there", "other", "new"])
def test_the_id_decides_whatever_the_name_says(tmp_path, version, name):
    registry = start(tmp_path)
    there = registry.create_topic("there", 2)
    registry.create_topic("other", 1)
    ids = (there.topic_id, b"?" * 16)
    request = MetadataRequest(
        topics=[MetadataRequestTopic(name=name, topic_id=each) for each in ids]
    )
    made = context(registry, version=version, auto_create_topics=True, logs=fake_logs())
    response = handle_metadata(request, made)
    first, second = response.topics
    assert (first.error_code, first.name, first.topic_id) == (0, "there", ids[0])
    assert len(first.partitions) == 2
    assert second.error_code == ErrorCode.UNKNOWN_TOPIC_ID
    assert (second.name, second.topic_id) == (None, ids[1])
    assert registry.topic("new") is None
