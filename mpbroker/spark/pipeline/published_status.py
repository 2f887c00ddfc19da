"""Publish a pipeline's status while it runs, and read it from another process.

A running pipeline replaces the file ``mpbroker-status.json`` in its checkpoint every
two seconds (in an object store: every 30), whatever Spark is doing, and a last time at
its end. A pipeline that was killed leaves a file that says "running": on the same
machine a reader looks for the process, elsewhere at the age of the file.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from msgspec import Struct
from pyarrow import fs

from mpbroker.spark.file_systems import replace_file
from mpbroker.spark.lag import offsets_behind
from mpbroker.spark.pipeline.description import Description
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.progress import Progress
from mpbroker.spark.pipeline.staging import open_directory

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

FILE: Final = "mpbroker-status.json"
_EVERY_S: Final = 2.0
_EVERY_REMOTE_S: Final = 30.0
# Rates are means over this time.
_RATE_S: Final = 60.0
# A file is stale after so many times its interval, and a grace for slow clocks.
_STALE_TIMES: Final = 5
_STALE_S: Final = 10.0

State = Literal["starting", "running", "done", "stopped", "failed"]


class Status(Struct, kw_only=True):
    """The status that a pipeline publishes; times are seconds since 1970.

    Attributes:
        host: the name of the driver's machine.
        pid: the id of the driver's process on that machine.
        process_began: the clock tick after boot in which that process began: it tells
            the process from a later one with the same id.
        every_s: seconds from one publication to the next.
        rows_per_s: rows a second in the last minute.
        committed_s: the time at which this run has committed its last batch.
        behind: the number of offsets still to be read, as of the last batch, or as of
            the start if there was none.
        behind_bytes: the size of their records, estimated from that of the partitions.
        catch_up_s: seconds until nothing is behind, at the pace of the last minute;
            None: the pipeline does not catch up, or the pace is not known yet.
        error: the reason if the pipeline failed.
    """

    name: str
    job: str
    state: State = "starting"
    host: str
    pid: int
    process_began: int
    started_s: float
    at_s: float
    every_s: float
    trigger_s: float
    source: str = ""
    table: str = ""
    rows: int = 0
    rows_per_s: float = 0.0
    bad: int = 0
    late: int = 0
    batches: int = 0
    last_batch: int | None = None
    committed_s: float | None = None
    behind: int | None = None
    behind_bytes: int | None = None
    catch_up_s: float | None = None
    error: str = ""


class Publisher:
    """Writes the status of a pipeline's run into its checkpoint, again and again."""

    def __init__(self, description: Description, progress: Progress) -> None:
        """Open the pipeline's checkpoint directory; write no status yet.

        Raises:
            PipelineError: the checkpoint cannot be used.
        """
        self._files, inside = open_directory(description.checkpoint)
        self._path = f"{inside}/{FILE}"
        self._progress = progress
        local = isinstance(self._files, fs.LocalFileSystem)
        now = time.time()
        self._status = Status(
            name=description.name,
            job=description.job,
            host=socket.gethostname(),
            pid=os.getpid(),
            process_began=process_began(os.getpid()) or 0,
            started_s=now,
            at_s=now,
            every_s=_EVERY_S if local else _EVERY_REMOTE_S,
            trigger_s=description.trigger_s,
            source=_source(description),
            table=description.table.path if description.table else "",
        )
        self._offset_bytes: float | None = None
        self._seen: deque[tuple[float, int, int | None]] = deque()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._said = False

    def begin(self, behind: int, offset_bytes: float | None) -> None:
        """Publish the status now, and start the thread that does so again and again.

        Args:
            behind: the number of offsets to be read.
            offset_bytes: the mean number of bytes for each offset; None: not known.
        """
        self._offset_bytes = offset_bytes
        self._status.behind = behind
        self._publish()
        self._thread.start()

    def look(self, query: StreamingQuery) -> None:
        """Note how far a streaming query is behind, for the next published status."""
        done = query.lastProgress
        self._status.state = "running"
        if done is not None:
            found = [offsets_behind(each) for each in done["sources"]]
            if any(found):
                self._status.behind = sum(sum(each.values()) for each in found)

    def end(self, state: State, error: str = "") -> None:
        """Stop the publishing thread, and publish the pipeline's final status."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._status.state, self._status.error = state, error
        if state == "done" and not self._status.trigger_s:
            self._status.behind = 0  # all that there was
        self._publish()

    def _run(self) -> None:
        while not self._ended.wait(self._status.every_s):
            self._publish()

    def _publish(self) -> None:
        status, progress = self._status, self._progress
        with self._lock:
            status.at_s = now = time.time()
            status.rows, status.bad = progress.rows, progress.bad
            status.late, status.batches = progress.late, progress.batches
            status.last_batch = progress.last_batch
            status.committed_s = progress.committed_s
            self._rates(now)
            content = msgspec.json.encode(status)
        try:
            replace_file(self._files, self._path, content)
        except OSError as error:
            if not self._said:
                self._said = True
                progress.say(f"the status is not published: {error}")

    def _rates(self, now: float) -> None:
        status = self._status
        self._seen.append((now, status.rows, status.behind))
        while now - self._seen[0][0] > _RATE_S and len(self._seen) > 2:
            self._seen.popleft()
        began, rows, behind = self._seen[0]
        elapsed = now - began
        status.rows_per_s = (status.rows - rows) / elapsed if elapsed > 0 else 0.0
        status.catch_up_s = None
        if status.behind is None:
            return
        if self._offset_bytes is not None:
            status.behind_bytes = int(status.behind * self._offset_bytes)
        if not status.behind:
            status.catch_up_s = 0.0
        elif behind is not None and behind > status.behind and elapsed > 0:
            status.catch_up_s = status.behind * elapsed / (behind - status.behind)


def _source(description: Description) -> str:
    names = ("subscribe", "subscribepattern", "assign")
    given = {name.lower(): text for name, text in description.source.items()}
    return next((given[name] for name in names if name in given), "")


def process_began(pid: int) -> int | None:
    """Return the clock tick after boot in which a process began; None: there is none.

    Source: proc_pid_stat(5), field 22.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[19]) if fields[0] not in (b"Z", b"X") else None


# -- reading ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """The state of a pipeline, as read from its published status.

    Attributes:
        state: "never" if nothing was published; "gone" if the process that published
            "starting" or "running" is dead; "stale" if it may be dead: it is on another
            machine, and the file is old. Otherwise the state in the file.
        status: None if nothing was published.
    """

    name: str
    state: str
    status: Status | None

    @property
    def is_well(self) -> bool:
        """Whether the pipeline runs, or has ended without an error."""
        return self.state in ("starting", "running", "done", "stopped")


def find(
    description: Description,
    *,
    now: Callable[[], float] = time.time,
    host: str | None = None,
) -> Found:
    """Read the status that a pipeline has published in its checkpoint.

    Args:
        host: the name of this machine; None: ask the system.

    Raises:
        PipelineError: the pipeline has no checkpoint, or its file cannot be read.
    """
    if not description.checkpoint:
        raise PipelineError(
            f"{description.name}: a pipeline of job {description.job} has no"
            " checkpoint, and publishes no status there"
        )
    files, inside = open_directory(description.checkpoint)
    path = f"{inside}/{FILE}"
    try:
        if files.get_file_info(path).type != fs.FileType.File:
            return Found(description.name, "never", None)
        with files.open_input_stream(path) as stream:
            status = msgspec.json.decode(stream.read(), type=Status)
    except (OSError, msgspec.DecodeError) as error:
        raise PipelineError(f"{path} cannot be read: {error}") from error
    state: str = status.state
    if state in ("starting", "running"):
        if status.host == (host or socket.gethostname()):
            if process_began(status.pid) != status.process_began:
                state = "gone"
        elif now() - status.at_s > _STALE_TIMES * status.every_s + _STALE_S:
            state = "stale"
    return Found(description.name, state, status)
