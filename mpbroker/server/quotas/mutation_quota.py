"""How many partitions one request may make or delete (KIP-599)."""

from __future__ import annotations

from collections.abc import Callable

from mpbroker.ipc.tables.quota_table import GONE, QuotaRow
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError


class MutationQuota:
    """One request's view of its client's controller_mutation_rate.

    Args:
        find_row: finds that of its client; None: there is no room for one.
        bound: partitions a second.
        burst: partitions at once, after a while of quiet.
        mute: told for how many ms the client has to be quiet.
        strict: refuse changes while there is a debt, instead of letting it grow.

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
            ApiError: THROTTLING_QUOTA_EXCEEDED: it must not be made now.
        """
        taken, throttle_ms = self._mutate(partitions)
        if throttle_ms == GONE:  # of which the next look finds the new one
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
