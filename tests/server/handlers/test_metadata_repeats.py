"""A topic that a request names often is described once."""

from mpbroker.metadata.topics import Topic
from mpbroker.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from mpbroker.server.handlers.metadata import handle_metadata
from tests.server.contexts import context


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
