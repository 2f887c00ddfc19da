"""Log denials: one line for each kind of denial, at most one a minute.

A denied client often repeats its request, and a thousand clients may do so. Denials
with equal principal, host, operation and resource are of one kind. The first is logged
at once. The denials of the next minute are only counted; the first after that minute is
logged, with their number. At most 50 lines are written in ten seconds, for any number
of principals and names.

Source: Kafka's StandardAuthorizerData.buildAuditMessage; log4j's
kafka.authorizer.logger.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.protocol.acl import AclOperation, ResourceType, shown
from mpbroker.protocol.api_key import ApiKey
from mpbroker.server.request_context import RequestContext

_LOG = get_logger(__name__)

_AGAIN_NS: Final = 60_000_000_000
_WINDOW_NS: Final = 10_000_000_000
_LINES_A_WINDOW: Final = 50
_MAX_REMEMBERED: Final = 1000
_MAX_SHOWN: Final = 249  # characters; the longest name of a topic


class DenialLog:
    """Logs and counts denials; remembers up to 1000 kinds.

    Args:
        now_ns: returns the time (CLOCK_MONOTONIC).
        say: writes a line of the log.
    """

    def __init__(
        self,
        now_ns: Callable[[], int] = time.monotonic_ns,
        say: Callable[..., None] = _LOG.info,
    ) -> None:
        self._now_ns = now_ns
        self._say = say
        self._recent: dict[object, list[int]] = {}  # next line due, denials since
        self._window_ends = 0
        self._lines = 0
        self._left_out = 0

    def note(
        self,
        context: RequestContext,
        operation: AclOperation,
        resource_type: ResourceType,
        name: str,
    ) -> None:
        """Count a denial of the authorizer, and log it if a line is due."""
        now = self._now_ns()
        key = context.principal, context.host, operation, resource_type, name
        recent = self._recent.get(key)
        if recent is not None and now < recent[0]:
            recent[1] += 1
            return
        if not self._has_room(now):
            return
        if recent is None:
            if len(self._recent) >= _MAX_REMEMBERED:
                self._recent.clear()
            recent = self._recent[key] = [0, 0]
        more = f", {recent[1]} times more before" if recent[1] else ""
        recent[:] = [now + _AGAIN_NS, 0]
        self._say(
            "Principal = %s is Denied operation = %s from host = %s on resource ="
            " %s:LITERAL:%s for request = %s%s",
            printable(context.principal),
            shown(operation),
            context.host,
            shown(resource_type),
            printable(name),
            shown(ApiKey(context.api_key)),
            more,
        )

    def _has_room(self, now: int) -> bool:
        if now >= self._window_ends:
            if self._left_out:
                self._say("%d more denials were not logged", self._left_out)
            self._window_ends = now + _WINDOW_NS
            self._lines = self._left_out = 0
        if self._lines >= _LINES_A_WINDOW:
            self._left_out += 1
            return False
        self._lines += 1
        return True


def printable(text: str) -> str:
    """Return a client's text in a form that fits into one log line.

    It is cut after 249 characters, and escaped if a character is not printable.
    """
    if len(text) > _MAX_SHOWN:
        text = text[:_MAX_SHOWN] + "..."
    return text if text.isprintable() else ascii(text)
