"""An authorizer for tests, and the objects around it."""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.headers import RequestHeader
from mpbroker.server.authorization.authorization import Authorization
from mpbroker.server.authorization.authorizer import Authorizer
from mpbroker.server.authorization.denial_log import DenialLog
from mpbroker.server.request import Request
from mpbroker.server.request_context import Sender

TOPIC_ID = b"i" * 16
OTHER_ID = b"j" * 16


class FakeTopic:
    def __init__(self, name, topic_id, *, is_internal=False):
        self.name = name
        self.topic_id = topic_id
        self.is_internal = is_internal
        self.partitions = [0]


class FakeTopics:
    """Topics "t" and "other"; __consumer_offsets is internal."""

    def __init__(self):
        self.all = [
            FakeTopic("t", TOPIC_ID),
            FakeTopic("other", OTHER_ID),
            FakeTopic("__consumer_offsets", b"k" * 16, is_internal=True),
        ]

    def topics(self):
        return self.all

    def topic(self, name):
        return next((topic for topic in self.all if topic.name == name), None)

    def topic_by_id(self, topic_id):
        return next((topic for topic in self.all if topic.topic_id == topic_id), None)


class Granting(Authorizer):
    """Allows what is listed, as (operation, name); notes what it was asked."""

    def __init__(self, *granted, version=1):
        self.granted = set(granted)
        self.asked = []
        self.kept_version = version

    @property
    def version(self):
        return self.kept_version

    def authorize(self, context, operation, resource):
        self.asked.append((operation, resource.type, resource.name))
        return (operation, resource.name) in self.granted


class Contexts:
    """One sender of everything."""

    def __init__(self):
        self.known = Sender("User:alice", "10.0.0.1", "PLAINTEXT", "PLAINTEXT")

    def sender(self, connection, slot):
        return self.known

    def name(self, connection):
        return f"connection {connection}"


class Lines:
    """The lines of a denial log."""

    def __init__(self):
        self.lines = []
        self.now = 0
        self.log = DenialLog(lambda: self.now, self._say)

    def _say(self, text, *arguments):
        self.lines.append(text % arguments)


def authorization(authorizer, *, auto_create=True, lines=None):
    return Authorization(
        authorizer,
        Contexts(),
        FakeTopics(),
        auto_create_topics=auto_create,
        denials=(lines or Lines()).log,
    )


def request_of(message, version):
    """A request that carries a message."""
    header = RequestHeader(ApiKey(message.api_key), version, 1, "client", 0)
    body = memoryview(message.encode(version))
    return Request(5, 7, 0, header, body, flexible_response=False)
