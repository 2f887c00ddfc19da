"""Limit how many partitions one request may create or delete (KIP-599)."""

from __future__ import annotations

from collections.abc import Callable

from mpbroker.ipc.tables.quota_table import GONE, QuotaRow
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError


class MutationQuota:
    """The controller_mutation_rate of a client, as one of its requests uses it.

    Args:
        find_row: returns the client's row; None: the table had no room for one, and
            nothing is limited.
        bound: partitions per second.
        burst: partitions that may be changed at once, after a time without changes.
        now_ns: the time (CLOCK_MONOTONIC).
        mute: called with the throttle time in ms.
        strict: whether to refuse changes while the client is above its quota. If not,
            changes are made, and the throttle time grows.

    Source: Kafka's StrictControllerMutationQuota, PermissiveControllerMutationQuota.
    """

    def __init__(
        self,
        find_row: Callable[[], QuotaRow | None],
        bound: float,
        burst: float,
        now_ns: Callable[[], int],
        mute: Callable[[int], None],
        *,
        strict: bool,
    ) -> None:
        self._find_row = find_row
        self._bound = bound
        self._burst = burst
        self._now_ns = now_ns
        self._mute = mute
        self._strict = strict

    def take(self, partitions: int) -> None:
        """Count a change before it is made.

        Raises:
            ApiError: THROTTLING_QUOTA_EXCEEDED: the change must not be made now.
        """
        taken, throttle_ms = self._mutate(partitions)
        if throttle_ms == GONE:  # the row is another client's now: find the new one
            taken, throttle_ms = self._mutate(partitions)
        if throttle_ms > 0:
            self._mute(throttle_ms)
        if not taken:
            raise ApiError(
                ErrorCode.THROTTLING_QUOTA_EXCEEDED,
                "The throttling quota has been exceeded.",
            )

    def _mutate(self, partitions: int) -> tuple[bool, int]:
        row = self._find_row()
        if row is None:
            return True, 0
        return row.mutate(
            partitions, self._bound, self._burst, self._now_ns(), strict=self._strict
        )
