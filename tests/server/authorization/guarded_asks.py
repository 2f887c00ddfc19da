"""Messages of every API, executed with an authorizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.fields import Struct
from mpbroker.server.api_messages import (
    error_answer,
    request_class,
    response_class,
)
from mpbroker.server.apis import APIS
from mpbroker.server.message_apis import MessageApi
from tests.server.authorization.authorization_stage import (
    TOPIC_ID,
    Granting,
    authorization,
    request_of,
)

E = ErrorCode
K = ApiKey
TOPIC, GROUP, CLUSTER, ID = (
    E.TOPIC_AUTHORIZATION_FAILED,
    E.GROUP_AUTHORIZATION_FAILED,
    E.CLUSTER_AUTHORIZATION_FAILED,
    E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
)


def sample(cls: type[Struct], version: int, key: ApiKey) -> Any:
    """A message that names topic t, group g and transactional id x wherever it can."""
    message = cls()
    for row in cls.__fields__:
        if not row.present_in(version):
            continue
        value = _sample_value(row, version, key)
        if value is not None:
            setattr(message, row.name, [value] if row.is_array else value)
    return message


def _sample_value(row: Any, version: int, key: ApiKey) -> Any:
    name = row.name
    if row.struct is not None:
        return None if name == "cursor" else sample(row.struct, version, key)
    if name in ("transactional_id", "v3_and_below_transactional_id") or (
        name == "transactional_ids"
    ):
        return "x"
    if name in ("group_id", "groups", "group_ids", "groups_names"):
        return "g"
    if name in ("key", "coordinator_keys"):
        return "g"
    if name == "topic_id":
        # Where there is a name as well, that is what counts.
        named = key in (K.METADATA, K.DELETE_TOPICS)
        return None if named else TOPIC_ID
    if name in ("resource_type", "resource_type_filter"):
        return 2
    if name in ("name", "topic", "topic_names", "resource_name"):
        return "t"
    if name in ("partition_index", "partition", "partitions", "partition_indexes"):
        return 0
    if name == "subscribed_topic_names":
        return "t"
    if name == "include_authorized_operations":
        return True
    return None


def codes_of(value: Any) -> set[int]:
    """All error codes in a message."""
    found = set()
    if isinstance(value, list):
        for each in value:
            found |= codes_of(each)
    elif isinstance(value, Struct):
        for row in type(value).__fields__:
            if row.name.endswith("error_code"):
                found.add(getattr(value, row.name))
            else:
                found |= codes_of(getattr(value, row.name))
    return found - {0}


def texts_of(value: Any) -> set[str]:
    """All texts in a message."""
    if isinstance(value, str):
        return {value}
    if isinstance(value, list):
        return set().union(*map(texts_of, value)) if value else set()
    if isinstance(value, Struct):
        return set().union(
            *(texts_of(getattr(value, row.name)) for row in type(value).__fields__)
        )
    return set()


class Handler:
    """Answers with an empty response; remembers a copy of the message it has seen."""

    def __init__(self, key: ApiKey, response: Any = None) -> None:
        self.key = key
        self.response = response
        self.seen: Any = None

    def __call__(self, request: Any, message: Any, access: Any, amend: Any) -> bytes:
        version = request.api_version
        self.seen = copy(message, version)
        response = copy(self.response or response_class(self.key)(), version)
        if amend is not None:
            amend(response)
        return response.encode(version)


def copy(message: Any, version: int) -> Any:
    return type(message).decode(version, memoryview(message.encode(version)))


def guarded(key: ApiKey, handler: Any, authorization: Any) -> Callable[[Any], Any]:
    """Return what executes an API's requests with the handler of a test."""
    return MessageApi(APIS[key], authorization, handler).execute


def ask(
    message: Any, version: int, *granted: Any, response: Any = None, **options: Any
) -> tuple[Any, Any]:
    """Return the answer, and the message that the handler has seen."""
    key = ApiKey(type(message).api_key)
    handler = Handler(key, response)
    handle = guarded(key, handler, authorization(Granting(*granted), **options))
    request = request_of(message, version)
    try:
        body = handle(request)
    except ApiError as error:
        body = error_answer(request, error.error_code)
        assert body is not None, f"{key.name} v{version} has no place for the error"
    return response_class(key).decode(version, memoryview(body)), handler.seen


def make(key: ApiKey, **fields: Any) -> Any:
    return request_class(key)(**fields)


def part(key: ApiKey, name: str, /, **fields: Any) -> Any:
    """A struct of an API's module."""
    module = __import__(
        f"mpbroker.protocol.messages.{key.name.lower()}", fromlist=[name]
    )
    return getattr(module, name)(**fields)
