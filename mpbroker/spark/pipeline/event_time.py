"""Keep how far event time has come in a stream, in the stream's checkpoint.

The age of rows counts from there, not from the clock on the wall: the rows of a backlog
are old, and still in order. As for Spark's watermark, rows of one batch say nothing of
each other: a batch is judged by those before it.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct
from pyarrow import fs

from mpbroker.spark.file_systems import replace_file
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.staging import open_directory

FILE: Final = "mpbroker-event-time.json"
_VERSION: Final = 1


class _Version(Struct):
    """The part of the file's content that each version has."""

    version: int


class _Content(_Version):
    """The file's content: the latest event time at the end of some batches."""

    latest_us: dict[int, int]  # by batch id


class EventTimes:
    """Knows the latest event time up to each of a stream's newest batches."""

    def __init__(self, checkpoint: str) -> None:
        """Open the stream's checkpoint directory; read and write nothing.

        Raises:
            PipelineError: the directory cannot be used.
        """
        self._files, inside = open_directory(checkpoint)
        self._path = f"{inside}/{FILE}"

    def before(self, batch_id: int) -> int | None:
        """Return the latest event time of earlier batches, in microseconds since 1970.

        None: there were none. The result is the same each time that a batch runs.

        Raises:
            PipelineError: the file cannot be read, or a later mpbroker has written it.
        """
        earlier = self._earlier(batch_id)
        return earlier[max(earlier)] if earlier else None

    def add(self, batch_id: int, latest_us: int) -> None:
        """Note the latest event time in a batch, before the batch is committed.

        Args:
            latest_us: in microseconds since 1970; earlier batches may have a later one.

        Raises:
            PipelineError: the file cannot be read or written.
        """
        earlier = self._earlier(batch_id)
        kept = {}
        if earlier:
            # The batch may run again if it is not committed: it will need this entry.
            newest = max(earlier)
            kept[newest] = earlier[newest]
            latest_us = max(latest_us, earlier[newest])
        content = msgspec.json.encode(_Content(_VERSION, {**kept, batch_id: latest_us}))
        try:
            replace_file(self._files, self._path, content)
        except OSError as error:
            raise PipelineError(f"{self._path} cannot be written: {error}") from error

    def _earlier(self, batch_id: int) -> dict[int, int]:
        try:
            if self._files.get_file_info(self._path).type != fs.FileType.File:
                return {}
            with self._files.open_input_stream(self._path) as stream:
                content = stream.read()
            version = msgspec.json.decode(content, type=_Version).version
            if version != _VERSION:
                raise PipelineError(
                    f"{self._path} has version {version}, and this mpbroker reads"
                    f" version {_VERSION}: run the pipeline with the mpbroker that"
                    " wrote it"
                )
            found = msgspec.json.decode(content, type=_Content)
        except (OSError, msgspec.DecodeError) as error:
            raise PipelineError(f"{self._path} cannot be read: {error}") from error
        return {each: at for each, at in found.latest_us.items() if each < batch_id}
