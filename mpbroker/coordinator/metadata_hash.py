"""Hash the topics of a group, to tell whether they have changed.

The hash is stored in the group's record when a group epoch begins.
"""

from __future__ import annotations

from collections.abc import Mapping


def metadata_hash(topics: Mapping[str, int]) -> int:
    """Return a hash of topics, which changes if topics or partition counts change.

    Args:
        topics: the number of partitions of each topic, by name.

    Returns:
        A signed 64-bit number; 0 without topics.
    """
    if not topics:
        return 0
    from hashlib import sha256  # imported here: OpenSSL costs 4 ms and 2 MiB

    text = repr(sorted(topics.items())).encode()
    return int.from_bytes(sha256(text).digest()[:8], "big", signed=True)
