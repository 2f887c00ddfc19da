"""Compute percentiles of times from two readings of histograms in shared memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from mpbroker.ipc.counters.request_metrics import ApiMetrics, Stage, bounds_s

_BOUNDS: Final = bounds_s()


def percentile(counts: Sequence[int], share: float) -> float | None:
    """Return the time below which a share of the counted times lies, in seconds.

    The bucket is exact; its bounds differ by a factor of two. Within the bucket the
    times are assumed to be spread evenly.

    Args:
        counts: the number of times in each bucket of the histogram.
        share: the share, from 0 to 1.

    Returns:
        The time; if it lies in the last bucket, which has no upper bound, that bucket's
        lower bound. None: nothing was counted.
    """
    total = sum(counts)
    if not total:
        return None
    wanted, passed = share * total, 0
    for index, count in enumerate(counts):
        if count and passed + count >= wanted:
            lower = _BOUNDS[index - 1] if index else 0.0
            if index >= len(_BOUNDS):
                return lower
            return lower + (_BOUNDS[index] - lower) * (wanted - passed) / count
        passed += count
    return _BOUNDS[-1]


def counted_since(
    before: Mapping[int, ApiMetrics], after: Mapping[int, ApiMetrics], key: int
) -> list[list[int]]:
    """Return the growth of an API's histograms between two readings.

    Args:
        before, after: the readings, by API key.
        key: the API key.

    Returns:
        For each stage, the growth of each bucket.
    """
    found = []
    for stage in Stage:
        new = after[key].stages[stage].counts
        old = before[key].stages[stage].counts if key in before else [0] * len(new)
        found.append([max(0, a - b) for a, b in zip(new, old, strict=True)])
    return found
