"""Define ``format("mpbroker")``, which reads and writes topics without a jar.

    spark.dataSource.register(MpbrokerDataSource)
    spark.read.format("mpbroker").option("kafka.bootstrap.servers", ...)...

And ``format("mpbroker-segments")``, which reads segments without the broker.

    spark.read.format("mpbroker-segments")
        .option("path", "/var/lib/mpbroker").option("subscribe", "events").load()

Spark imports this module in several new processes for each query. Modules that only
some of these processes need are imported in the methods that use them.

Source: PySpark's Python Data Source API, with Arrow record batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from mpbroker.spark.schema import HEADERS_DDL, SCHEMA_DDL

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from mpbroker.spark.readers import BatchReader, StreamReader
    from mpbroker.spark.segments import SegmentsReader
    from mpbroker.spark.sink import BatchWriter, StreamWriter


class MpbrokerDataSource(DataSource):
    """Reads and writes topics, with the options and columns of Spark's ``kafka``."""

    @classmethod
    def name(cls) -> str:
        return "mpbroker"

    def schema(self) -> str:
        return _schema(self.options)

    def reader(self, schema: StructType) -> BatchReader:
        from mpbroker.spark.options import parse_source_options
        from mpbroker.spark.readers import BatchReader

        return BatchReader(parse_source_options(self.options, streaming=False))

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        from mpbroker.spark.options import OptionError
        from mpbroker.spark.sink import BatchWriter, check_schema, parse_sink_options

        options = parse_sink_options(self.options)
        if overwrite:
            raise OptionError(
                "mode overwrite is not supported: a topic can only be appended to; use"
                " mode append"
            )
        check_schema(schema, options)
        return BatchWriter(options)

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> StreamWriter:
        from mpbroker.spark.sink import StreamWriter, check_schema, parse_sink_options

        options = parse_sink_options(self.options)
        check_schema(schema, options)
        return StreamWriter(options)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802
        from mpbroker.spark.options import parse_source_options
        from mpbroker.spark.readers import StreamReader

        return StreamReader(parse_source_options(self.options, streaming=True))


class SegmentsDataSource(DataSource):
    """Reads the segments of a data directory, an archive, or a remote store."""

    @classmethod
    def name(cls) -> str:
        return "mpbroker-segments"

    def schema(self) -> str:
        return _schema(self.options)

    def reader(self, schema: StructType) -> SegmentsReader:
        from mpbroker.spark.segment_plan import parse_segment_options
        from mpbroker.spark.segments import SegmentsReader

        return SegmentsReader(parse_segment_options(self.options))

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802
        from mpbroker.spark.options import OptionError

        raise OptionError(
            "format mpbroker-segments is for batch queries; for a stream use format"
            " mpbroker, which asks the broker"
        )


def _schema(options: Mapping[str, str]) -> str:
    with_headers = str(options.get("includeHeaders", "false")).lower()
    return SCHEMA_DDL + (HEADERS_DDL if with_headers == "true" else "")
