"""Refuse changes of the voters of the metadata log, since this node is the only one."""

from __future__ import annotations

from mpbroker.protocol.error_code import ErrorCode


def voter_refusal(
    asked: str | None, cluster_id: str, change: str
) -> tuple[ErrorCode, str]:
    """Return the error code and the message that refuse to change the voters.

    Args:
        asked: the cluster id of the request; None: the request names none.
        cluster_id: this cluster's id.
        change: what the request wants, for example "adding voter".
    """
    if asked is not None and asked != cluster_id:
        return (
            ErrorCode.INCONSISTENT_CLUSTER_ID,
            f"The cluster id of the request is {asked}, and this cluster's is"
            f" {cluster_id}",
        )
    return (
        ErrorCode.UNSUPPORTED_VERSION,
        f"Cluster doesn't support {change} because the kraft.version feature is 0:"
        " mpbroker is a single node, which keeps the metadata log alone",
    )
