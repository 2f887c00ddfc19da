"""A topic that a request names often is described once."""

from mpbroker.metadata.topics import Topic
from mpbroker.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from mpbroker.server.handlers.metadata import MetadataAnswers


class NoTopics:
    def topic(self, name: str) -> Topic | None:
        return None

    def topic_by_id(self, topic_id: bytes) -> Topic | None:
        return None

    def topics(self) -> list[Topic]:
        return []


def test_a_name_that_is_repeated_is_answered_once() -> None:
    answers = MetadataAnswers(
        NoTopics(), node_id=1, rack=None, cluster_id="c", create=None
    )
    request = MetadataRequest(
        topics=[MetadataRequestTopic(name=name) for name in "abaab"]
    )
    response = answers.handle(request, 9, "localhost", 9092)
    assert [topic.name for topic in response.topics] == ["a", "b"]
