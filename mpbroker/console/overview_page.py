"""Show figures of the broker's processes in the console: an overview, a history.

The exporter makes both, and puts them on a board (memory that it shares with the
console). They contain figures of all clients, so the broker is asked whether the user
may describe the cluster.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import orjson

from mpbroker.client.cluster import Cluster
from mpbroker.client.errors import ApiError, ErrorCode, check_error
from mpbroker.console.request_fields import number_of
from mpbroker.console.sessions import Session
from mpbroker.inspect.overview_board import STEP_S, OverviewBoard
from mpbroker.protocol.acl import AclOperation
from mpbroker.protocol.messages.describe_cluster import (
    DescribeClusterRequest,
    DescribeClusterResponse,
)


def show_overview(
    board: OverviewBoard, session: Session, query: Mapping[str, str]
) -> Any:
    """Return the latest overview (figures of the broker's processes) and its age in s.

    Both are None if the exporter, the process that makes overviews, has not made one.
    """
    _check_right(session)
    found = board.document()
    if found is None:
        return {"age_s": None, "overview": None}
    document, at_ns = found
    age_s = max(0.0, (time.monotonic_ns() - at_ns) / 1e9)
    return {"age_s": age_s, "overview": orjson.Fragment(document)}


def show_history(
    board: OverviewBoard, session: Session, query: Mapping[str, str]
) -> Any:
    """Return the figures of the broker's processes over the last hour.

    There is a list for each figure. The query's ``after`` (s since 1970) leaves out
    the values up to that time.
    """
    _check_right(session)
    columns = board.history(number_of(query, "after"))
    return {
        "step_s": STEP_S,
        "columns": {
            name: [None if each is None else round(each, 3) for each in values]
            for name, values in columns.items()
        },
    }


def _check_right(session: Session) -> None:
    """Raise ApiError if the user may not describe the cluster."""

    def ask(cluster: Cluster) -> list[dict[str, Any]]:
        request = DescribeClusterRequest(include_cluster_authorized_operations=True)
        answer = cluster.any_broker().request(request, DescribeClusterResponse)
        check_error(answer.error_code, answer.error_message or "")
        return [{"operations": answer.cluster_authorized_operations}]

    (rights,) = session.remembered("cluster", ask, is_fresh=False)
    if not rights["operations"] >> AclOperation.DESCRIBE & 1:
        raise ApiError(
            ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
            "CLUSTER_AUTHORIZATION_FAILED: the overview needs Describe on the cluster",
        )
