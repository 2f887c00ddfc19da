"""The columns of format("mpbroker") and format("mpbroker-segments").

They are those of Spark's Kafka connector.
"""

from __future__ import annotations

from typing import Final

SCHEMA_DDL: Final = (
    "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT,"
    " timestamp TIMESTAMP, timestampType INT"
)
HEADERS_DDL: Final = ", headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
