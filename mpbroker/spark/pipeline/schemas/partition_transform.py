"""Parse the entries of ``table.partition_by``, in Iceberg's spelling.

carrier                 a column's values
day(time_hour)          year, month, day, hour of a timestamp, or of a date
bucket(16, carrier)     a hash of the values, modulo 16
truncate(2, carrier)    the first letters; whole numbers rounded down
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_CALL: Final = re.compile(r"\s*([a-z]+)\s*\(\s*(?:(\d{1,9})\s*,\s*)?(\w+)\s*\)\s*")
_TIMES: Final = ("timestamp", "date")
_HASHED: Final = ("int", "bigint", "string", "binary", "timestamp", "date")
# The column types that a transform takes, by its name; whether it has a width.
_TRANSFORMS: Final = {
    "year": (_TIMES, False),
    "month": (_TIMES, False),
    "day": (_TIMES, False),
    "hour": (("timestamp",), False),
    "bucket": (_HASHED, True),
    "truncate": (("int", "bigint", "string", "binary"), True),
}


class PartitionTransform(NamedTuple):
    """One entry of ``table.partition_by``.

    Attributes:
        column: the column that the partition is computed from.
        transform: the function, as Iceberg's metadata spells it: ``identity``,
            ``bucket[16]``.
        types: the column types that it takes; empty for ``identity``.
    """

    column: str
    transform: str
    types: tuple[str, ...]

    @property
    def name(self) -> str:
        """The partition field's name, as Iceberg's engines choose it."""
        kind = self.transform.partition("[")[0]
        short = {"truncate": "trunc"}.get(kind, kind)
        return self.column if kind == "identity" else f"{self.column}_{short}"


def parse_partition(text: str) -> PartitionTransform | None:
    """Parse an entry of ``table.partition_by``; None if Iceberg has no such form."""
    found = _CALL.fullmatch(text)
    if found is None:
        return PartitionTransform(text, "identity", ())
    name, width, column = found.groups()
    types, has_width = _TRANSFORMS.get(name, ((), False))
    if not types or has_width != bool(width and int(width)):
        return None
    return PartitionTransform(column, f"{name}[{width}]" if width else name, types)
