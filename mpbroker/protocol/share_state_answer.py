"""Make the answers to the five requests about the stored states of share groups.

Their messages are named alike: each request names partitions of topics, and its answer
has an entry for each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mpbroker.protocol.message import Message


def state_answer(request: Message, fill: Callable[[bytes, Any, Any], None]) -> Message:
    """Return the response to a request about the states of share groups.

    Args:
        request: one of the five requests, such as a ReadShareGroupStateRequest.
        fill: a function that fills in the result of one partition; it gets the topic's
            id, the partition's entry in the request, and its entry in the response.
    """
    messages: Any = sys.modules[type(request).__module__]
    verb, what = type(request).__name__.removesuffix("Request").split("ShareGroupState")
    result_class = getattr(messages, f"{verb}State{what}Result")
    answer: Any = getattr(messages, f"{verb}ShareGroupState{what}Response")(results=[])
    topics: Any = request.topics  # type: ignore[attr-defined]
    for topic in topics:
        rows = []
        for row in topic.partitions:
            result = messages.PartitionResult(partition=row.partition)
            fill(bytes(topic.topic_id), row, result)
            rows.append(result)
        answer.results.append(result_class(topic_id=topic.topic_id, partitions=rows))
    made: Message = answer
    return made
