"""Reads below the first local segment: the same bytes as before, or a clear error."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from types import SimpleNamespace

import pytest

from mpbroker.base.file_id import file_id
from mpbroker.base.storage_errors import RemotePendingError
from mpbroker.ipc.layout import RowStatus
from mpbroker.network.errors import SegmentGoneError
from mpbroker.network.response_sender import SegmentFiles
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records.control_record import (
    EndTransactionMarker,
    build_end_transaction_marker,
)
from mpbroker.protocol.records.record_batch import (
    iter_batches,
    parse_batch_header,
)
from mpbroker.storage.cleaning.log_upkeep import _partition_plan
from mpbroker.storage.cleaning.retention import apply_retention
from mpbroker.storage.log.log_loader import LoadHints
from mpbroker.storage.partition_directory import exclusive
from mpbroker.storage.remote import (
    chunk_fetcher,
    remote_cache,
    remote_log,
    remote_manifest,
)
from mpbroker.storage.remote.chunk_fetcher import ChunkFetcher
from mpbroker.storage.remote.fetch_failures import FetchFailures
from mpbroker.storage.remote.remote_cache import cache_of
from mpbroker.storage.remote.remote_manifest import RemoteManifest, log_key
from mpbroker.storage.remote.remote_partition import RemotePartition
from mpbroker.storage.remote.remote_plan import PartitionPlan
from mpbroker.storage.remote.remote_stats import SharedStats
from mpbroker.storage.remote.retry_backoff import BackoffLimits
from tests.storage.batches import batch, validated
from tests.storage.forks import kill_at_line
from tests.support.children import fork

_ID = bytes(range(16))
_PREFIX = f"{_ID.hex()}/0"
_NEVER = {"retention_ms": -1, "retention_bytes": -1}
_TIERED = {**_NEVER, "remote_storage_enable": True, "local_retention_bytes": 1}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of 128 bytes: batches, and also headers, are cut by their borders."""
    from mpbroker.storage.remote import chunk_fetcher, remote_partition

    for module in (chunk_fetcher, remote_cache, remote_manifest, remote_partition):
        monkeypatch.setattr(module, "CHUNK_BYTES", 128)


@pytest.fixture
def tiered(store, open_log, monkeypatch):
    """Return what makes a log with remote segments, and a reader process of it."""

    def make(log, limit_bytes=1 << 30):
        stats = SharedStats(os.path.dirname(log.directory))
        failures = FetchFailures(BackoffLimits(first_s=0.0))
        cache = cache_of(log.directory)
        fetcher = ChunkFetcher(store, cache, limit_bytes, stats, failures=failures)
        asked = []

        def ask(wait, row):
            asked.append((row, wait._segment.base_offset, wait._chunk))
            fetcher.fetch(wait._prefix, wait._segment, wait._chunk)

        monkeypatch.setattr(remote_log.ChunkWait, "ask", ask)

        def copy():
            state = log.row.snapshot()
            plan = PartitionPlan(
                "t",
                _ID,
                0,
                log.directory,
                state.active_base_offset,
                log.row.log_start_offset,
            )
            return RemotePartition(store, "t", _ID, 0).run(plan)

        copy()
        return SimpleNamespace(fetcher=fetcher, asked=asked, copy=copy)

    return make


def patiently(read):
    """Call what may ask for chunks, until it asks for no more."""
    for _ in range(1000):
        try:
            return read()
        except RemotePendingError as pending:
            assert not pending.wait.is_over()
            pending.wait.ask(5)
            assert pending.wait.is_over() or pending.wait.failure()
            if pending.wait.failure():
                raise
    raise AssertionError("it asks for ever")


def bases(log):
    """Return where the local segments begin."""
    log.view.first_base_offset()  # reads the directory
    return log.view.segments.bases


def read(log, offset, max_bytes=1 << 30, **options):
    return patiently(
        lambda: log.reader.read(offset, max_bytes, min_one_batch=True, **options)
    )


def content(found):
    fd = os.open(found.segment_path, os.O_RDONLY)
    try:
        assert file_id(fd) == found.segment_id
        return os.pread(fd, found.length, found.position)
    finally:
        os.close(fd)


def read_through(log, offset, max_bytes):
    """Return the first offsets and bytes of all batches from an offset on."""
    batches = []
    while offset < log.lookup.latest():
        data = content(read(log, offset, max_bytes))
        whole = [bytes(each) for _, each in iter_batches(data)]
        assert whole
        batches += whole
        last = parse_batch_header(whole[-1])
        offset = last.base_offset + last.last_offset_delta + 1
    return batches


def fill(log, count, first=0):
    sizes = random.Random(1)
    for number in range(first, first + count):
        values = [b"v%05d" % number * sizes.randint(1, 30)] * sizes.randint(1, 4)
        log.append(batch(*values, timestamp=number * 1000), now_ms=1)


def test_what_was_local_is_read_again_byte_by_byte(open_log, tiered):
    log = open_log(segment_bytes=3_000, **_TIERED)
    fill(log, 60)
    whole = read_through(log, 0, 1 << 30)
    made = tiered(log)
    apply_retention(log, 0)
    assert len(bases(log)) == 1 < len(log.view.remote.segments())
    assert log.lookup.earliest() == 0
    for max_bytes in (1, 700, 1 << 30):
        assert read_through(log, 0, max_bytes) == whole
    # Another process, without anything in its memory, from every offset on.
    other = open_log(row=log.row.index, segment_bytes=3_000, **_TIERED)
    for offset in range(log.lookup.latest()):
        first = parse_batch_header(content(read(other, offset, 1)))
        assert (
            first.base_offset <= offset <= (first.base_offset + first.last_offset_delta)
        )
    assert made.asked


def test_a_batch_that_does_not_fit_is_left_out_unless_it_is_the_first(open_log, tiered):
    log = open_log(segment_bytes=3_000, **_TIERED)
    fill(log, 40)
    tiered(log)
    apply_retention(log, 0)
    found = patiently(lambda: log.reader.read(0, 10, min_one_batch=False))
    assert found.length == 0 and found.high_watermark == log.lookup.latest()
    assert read(log, 0, 10).length > 10


def test_offsets_are_found_by_timestamp_across_the_border(open_log, tiered):
    log = open_log(segment_bytes=3_000, **_TIERED)
    fill(log, 60)
    times = [*range(0, 61_000, 500), -1]
    before = [log.lookup.offset_for_timestamp(each) for each in times]
    newest = log.lookup.max_timestamp()
    assert log.lookup.earliest_pending_upload() == log.lookup.earliest() == 0
    tiered(log)
    apply_retention(log, 0)
    after = [
        patiently(lambda each=each: log.lookup.offset_for_timestamp(each))
        for each in times
    ]
    assert after == before
    assert patiently(log.lookup.max_timestamp) == newest
    first = bases(log)[0]
    assert log.lookup.earliest_local() == first > log.lookup.earliest() == 0
    assert log.lookup.latest_tiered() == first - 1
    assert log.lookup.earliest_pending_upload() == first


def committed(log, offset, max_bytes):
    """Return the offsets that a consumer of committed data delivers."""
    delivered = []
    while offset < log.lookup.latest():
        found = read(log, offset, max_bytes, read_committed=True)
        left = sorted(found.aborted_transactions, key=lambda each: each[1])
        aborted = set()
        for _, each in iter_batches(content(found)):
            header = parse_batch_header(bytes(each))
            last = header.base_offset + header.last_offset_delta
            while left and left[0][1] <= last:
                aborted.add(left.pop(0)[0])
            if header.is_control:
                aborted.discard(header.producer_id)
            elif header.producer_id not in aborted and last >= offset:
                delivered.append(header.base_offset)
            offset = last + 1
    return delivered


def with_transactions(open_log):
    """Return a log with transactions, two thirds of which were aborted."""
    log = open_log(segment_bytes=900, **_TIERED)
    for number in range(24):
        producer = (number % 3, 0, number // 3)
        sent = batch(b"%02d" % number * 60, producer=producer, transactional=True)
        log.append(sent, now_ms=1)
        if number % 6 == 5:  # two of each, which may be in two segments
            for one in range(3):
                end = EndTransactionMarker(commit=one == 1, coordinator_epoch=0)
                built = build_end_transaction_marker(one, 0, end, 5)
                log.append(validated(built), now_ms=1)
    return log


def test_readers_of_committed_data_skip_aborted_transactions(open_log, tiered):
    log = with_transactions(open_log)
    offsets = range(0, log.lookup.latest(), 2)
    before = [committed(log, offset, 700) for offset in offsets]
    assert len(before[0]) == 8
    tiered(log)
    apply_retention(log, 0)
    assert len(bases(log)) == 1
    assert [committed(log, offset, 700) for offset in offsets] == before
    other = open_log(row=log.row.index, segment_bytes=900, **_TIERED)
    assert committed(other, 0, 1) == before[0]


def test_a_first_segment_that_is_removed_amid_a_read_is_not_looked_for(
    open_log, tiered, monkeypatch
):
    log = with_transactions(open_log)
    expected = committed(log, 0, 700)
    made = tiered(log)
    apply_retention(log, 0)
    assert committed(log, 0, 700) == expected
    left = log.view.remote.segments()[1].next_base
    with_aborted = remote_log.RemoteLog._with_aborted
    removed = []

    def removed_now(*args):
        if not removed:
            removed.append(log.raise_log_start(left))
            made.copy()
        return with_aborted(*args)

    monkeypatch.setattr(remote_log.RemoteLog, "_with_aborted", removed_now)
    read(log, 0, 700, read_committed=True)
    assert removed and log.view.remote.segments()[0].base_offset == left
    assert committed(log, left, 700) == [each for each in expected if each >= left]


def evict(made, segment):
    """Evict a segment, as the reader process does when it fetches another one."""
    made.fetcher._sizes.move_to_end(segment.segment_id, last=False)
    limit, made.fetcher._limit = made.fetcher._limit, made.fetcher.size - 1
    made.fetcher._evict("")
    made.fetcher._limit = limit
    assert segment.segment_id not in made.fetcher._sizes


def test_an_index_of_aborted_transactions_that_is_evicted_is_not_taken_for_empty(
    open_log, tiered, monkeypatch
):
    log = with_transactions(open_log)
    before = committed(log, 0, 700)
    made = tiered(log)
    apply_retention(log, 0)
    assert committed(log, 0, 700) == before
    find = remote_log.segment_cache
    evicted = []

    def evicted_now(cache, segment):
        if not evicted:
            evicted.append(segment)
            evict(made, segment)
        return find(cache, segment)

    monkeypatch.setattr(remote_log, "segment_cache", evicted_now)
    assert committed(log, 0, 700) == before
    assert evicted


def test_retention_as_a_whole_counts_remote_segments_and_moves_the_start(
    open_log, tiered, store
):
    config = {**_TIERED, "retention_ms": 30_000}
    log = open_log(segment_bytes=3_000, **config)
    fill(log, 60)
    made = tiered(log)
    apply_retention(log, 0)
    segments = log.view.remote.segments()
    apply_retention(log, 60_000)
    old = [each for each in segments if each.largest_timestamp < 30_000]
    assert old and log.lookup.earliest() == old[-1].next_base
    version = log.row.structure_version
    assert apply_retention(log, 60_000) == []
    assert log.row.structure_version == version
    with pytest.raises(ApiError) as refused:
        log.reader.read(0, 100, min_one_batch=True)
    assert refused.value.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    made.copy()
    assert log.view.remote.segments() == segments[len(old) :]
    assert not any(
        log_key(_ID.hex() + "/0", each) in set(store.list("")) for each in old
    )


@pytest.mark.parametrize(
    "config", [{"remote_storage_enable": False}, {"local_retention_bytes": -2}]
)
def test_nothing_local_goes_without_reason(open_log, tiered, config):
    log = open_log(segment_bytes=3_000, **{**_TIERED, **config})
    fill(log, 30)
    tiered(log)
    assert apply_retention(log, 0) == []


def test_what_is_not_copied_stays(open_log, tiered):
    log = open_log(segment_bytes=3_000, **_TIERED)
    fill(log, 30)
    tiered(log)
    fill(log, 30, first=30)
    copied_to = log.view.remote.segments()[-1].next_base
    apply_retention(log, 0)
    assert bases(log)[0] == copied_to
    assert len(bases(log)) > 1


def test_a_start_finds_the_log_start_in_the_store(open_log, tiered):
    log = open_log(segment_bytes=3_000, **_TIERED)
    fill(log, 60)
    tiered(log)
    apply_retention(log, 0)
    log.close_cleanly()
    for hints in (LoadHints(clean=True), LoadHints()):
        again = open_log(segment_bytes=3_000, hints=hints, **_TIERED)
        assert again.lookup.earliest() == 0
        assert again.lookup.latest() == log.lookup.latest()
        assert len(read_through(again, 0, 1 << 30)) == len(read_through(log, 0, 999))
    later = open_log(
        segment_bytes=3_000, hints=LoadHints(log_start_offset=17), **_TIERED
    )
    assert later.lookup.earliest() == 17


def test_other_bytes_from_the_store_are_never_served(open_log, tiered, store):
    log = open_log(segment_bytes=3_000, **_TIERED)
    fill(log, 30)
    tiered(log)
    apply_retention(log, 0)
    segment = log.view.remote.segments()[0]
    key = log_key(_ID.hex() + "/0", segment)
    right = store.get(key)
    for wrong in (right[:200] + b"?" + right[201:], right[:300], b""):
        store.put(key, wrong)
        with pytest.raises(RemotePendingError) as pending:
            read_through(log, 0, 1 << 30)
        assert pending.value.wait.failure()
    store.delete([key])
    with pytest.raises(RemotePendingError) as pending:
        read(log, segment.next_base - 1)
    assert "has no object" in pending.value.wait.failure()
    store.put(key, right)
    assert read_through(log, 0, 1 << 30)
    assert not pending.value.wait.failure()


def test_the_cache_is_bounded_and_readers_of_what_goes_are_not_hurt(open_log, tiered):
    log = open_log(segment_bytes=3_000, **_TIERED)
    fill(log, 90)
    whole = read_through(log, 0, 1 << 30)
    made = tiered(log, limit_bytes=9_000)
    apply_retention(log, 0)
    found = read(log, 0)
    assert read_through(log, 0, 1 << 30) == whole
    assert made.fetcher.size <= 9_000
    assert not os.path.exists(found.segment_path)
    with open(found.segment_path + ".deleted", "rb") as file:
        file.seek(found.position)
        assert whole[0] in file.read(found.length)
    for _ in range(2):
        assert len(os.listdir(cache_of(log.directory))) > 1
        made.fetcher.remove_evicted()
    assert not os.path.exists(os.path.dirname(found.segment_path))
    assert read_through(log, 0, 1 << 30) == whole


def test_a_slow_connection_never_gets_a_file_that_came_later(open_log, tiered):
    """Its part of the file is a hole there, and the file system may give the inode."""
    log = open_log(segment_bytes=3_000, **_TIERED)
    fill(log, 60)
    made = tiered(log)
    apply_retention(log, 0)
    segment, *_ = log.view.remote.segments()
    made.fetcher.fetch(_PREFIX, log.view.remote.segments()[1], 0)
    found = read(log, 0)
    evict(made, segment)
    for _ in range(2):
        made.fetcher.remove_evicted()
    assert made.fetcher.fetch(_PREFIX, segment, 5)
    directory = os.path.dirname(found.segment_path)
    (again,) = (name for name in os.listdir(directory) if name.endswith(".log"))
    inode = os.stat(f"{directory}/{again}").st_ino
    with pytest.raises(SegmentGoneError):
        SegmentFiles().fd(found.segment_path, inode)


@pytest.mark.parametrize("step", range(5))
def test_a_segment_that_is_evicted_amid_its_fetch_can_be_fetched_again(
    open_log, tiered, monkeypatch, step
):
    log = open_log(segment_bytes=3_000, **_TIERED)
    fill(log, 60)
    whole = read_through(log, 0, 1 << 30)
    made = tiered(log, limit_bytes=500)  # less than a segment
    apply_retention(log, 0)
    slow, other, *_ = log.view.remote.segments()
    for chunk in range(10):
        made.fetcher.fetch(_PREFIX, other, chunk)
    left = [step]

    def interrupted(function):
        def call(*args, **options):
            if left[0] == 0:
                left[0] = -1
                made.fetcher.fetch(_PREFIX, other, 10)  # by another thread
            left[0] -= 1
            return function(*args, **options)

        return call

    for name in ("create_file", "write_file", "write_whole"):
        monkeypatch.setattr(chunk_fetcher, name, interrupted(vars(chunk_fetcher)[name]))
    made.fetcher.fetch(_PREFIX, slow, 0)
    assert left[0] < 0
    for segment_id in made.fetcher._sizes:
        names = os.listdir(f"{cache_of(log.directory)}/{segment_id}")
        assert any(name.endswith(".chunks") for name in names)
    assert read_through(log, 0, 1 << 30) == whole


def offset_in(log):
    """Return the offset of a record that is not the first of a remote segment."""
    return log.lookup.offset_for_timestamp(5_000)[1]


@pytest.mark.parametrize("find", [lambda log: content(read(log, 9, 100)), offset_in])
def test_a_segment_that_is_evicted_amid_a_read_is_fetched_again(
    open_log, tiered, monkeypatch, find
):
    log = open_log(segment_bytes=3_000, **_TIERED)
    fill(log, 60)
    made = tiered(log)
    apply_retention(log, 0)
    read_through(log, 0, 1 << 30)  # all is in the cache
    expected = find(log)
    enter = remote_cache.CachedSegment.__enter__
    evicted = []

    def evicted_now(self):
        if not evicted:
            evicted.append(self._segment)
            evict(made, self._segment)
        return enter(self)

    monkeypatch.setattr(remote_cache.CachedSegment, "__enter__", evicted_now)
    assert patiently(lambda: find(log)) == expected
    assert evicted and log.row.status == RowStatus.ONLINE


def test_a_segment_that_was_copied_without_indexes_is_read(open_log, tiered):
    log = open_log(segment_bytes=3_000, **_TIERED)
    fill(log, 60)
    whole = read_through(log, 0, 1 << 30)
    found = log.lookup.offset_for_timestamp(5_000)
    for name in os.listdir(log.directory):
        if name.endswith((".index", ".timeindex")) and int(name[:20]) < bases(log)[-1]:
            os.unlink(f"{log.directory}/{name}")
    tiered(log)
    apply_retention(log, 0)
    assert read_through(log, 0, 1 << 30) == whole
    assert patiently(lambda: log.lookup.offset_for_timestamp(5_000)) == found


def test_a_segment_that_is_evicted_again_and_again_is_removed_once(open_log, tiered):
    log = open_log(segment_bytes=3_000, **_TIERED)
    fill(log, 60)
    made = tiered(log)
    segment, other, *_ = log.view.remote.segments()
    made.fetcher.fetch(_PREFIX, other, 0)
    for turns in ((1, 1), (2, 0), (0, 1)):
        for count in turns:
            for _ in range(count):
                made.fetcher.fetch(_PREFIX, segment, 0)
                evict(made, segment)
            made.fetcher.remove_evicted()
    made.fetcher.remove_evicted()
    assert segment.segment_id not in os.listdir(cache_of(log.directory))


def test_a_log_without_its_manifest_says_so(open_log, tiered):
    log = open_log(segment_bytes=3_000, **_TIERED)
    fill(log, 30)
    tiered(log)
    apply_retention(log, 0)
    path = f"{log.directory}/remote-log-manifest"
    saved = RemoteManifest.of_directory(log.directory)
    with open(path, "wb") as file:
        file.write(b"damaged")
    with pytest.raises(ApiError) as refused:
        log.reader.read(0, 100, min_one_batch=True)
    assert refused.value.error_code == ErrorCode.KAFKA_STORAGE_ERROR
    with open(path, "wb") as file:
        file.write(saved.encode())
    assert read_through(log, 0, 1 << 30)


def test_a_segment_that_the_store_has_otherwise_stays(open_log, tiered):
    log = open_log(segment_bytes=3_000, **_TIERED)
    fill(log, 30)
    tiered(log)
    manifest = RemoteManifest.of_directory(log.directory)
    second = manifest.segments[1]
    other = manifest.with_segment(second._replace(size=second.size + 1))
    with open(f"{log.directory}/remote-log-manifest", "wb") as file:
        file.write(other.encode())
    apply_retention(log, 0)
    assert bases(log)[0] == second.base_offset


def test_a_directory_that_was_lost_goes_on_where_the_store_ends(open_log, tiered):
    log = open_log(segment_bytes=3_000, **_TIERED)
    fill(log, 60)
    tiered(log)
    end = bases(log)[-1]
    manifest = RemoteManifest.of_directory(log.directory)
    again = open_log(name="lost-0", segment_bytes=3_000, **_TIERED)
    with open(f"{again.directory}/remote-log-manifest", "wb") as file:
        file.write(manifest.encode())
    assert (again.lookup.earliest(), again.lookup.latest()) == (0, end)
    assert again.append(batch(b"new"), now_ms=1).base_offset == end
    whole = read_through(again, 0, 1 << 30)
    assert whole[:-1] == [
        each
        for each in read_through(log, 0, 1 << 30)
        if parse_batch_header(each).base_offset < end
    ]


def test_a_local_deletion_killed_at_any_line_loses_nothing(open_log, tiered):
    config = {"segment_bytes": 1_500, **_TIERED}
    log = open_log(**config)
    fill(log, 10)
    made = tiered(log)
    picker = random.Random(22)
    died = 0
    for turn in range(25):
        fill(log, 6, first=10 + 6 * turn)
        made.copy()

        def retain():
            mine = open_log(row=log.row.index, **config)
            kill_at_line(picker.randrange(1, 700))
            apply_retention(mine, 0)

        died += fork(retain) == -signal.SIGKILL
        picker.random()
        reader = open_log(row=log.row.index, **config)
        found = [parse_batch_header(each) for each in read_through(reader, 0, 1 << 30)]
        ends = [each.base_offset + each.last_offset_delta + 1 for each in found]
        assert [each.base_offset for each in found] == [0, *ends[:-1]]
        assert ends[-1] == log.lookup.latest()
    assert died > 5
    apply_retention(log, 0)
    assert len(bases(log)) == 1


class FileStore:
    """A store for a forked process: no thread of a library is in it."""

    def __init__(self, root):
        self._root = root

    def get(self, key, most=-1):
        with open(f"{self._root}/{key}", "rb") as file:
            return file.read(most)

    def get_range(self, key, start, length):
        return self.get(key)[start : start + length]


def test_a_reader_process_killed_at_any_line_leaves_no_wrong_byte(
    open_log, tiered, tmp_path
):
    log = open_log(segment_bytes=1_500, **_TIERED)
    fill(log, 30)
    whole = read_through(log, 0, 1 << 30)
    tiered(log)
    apply_retention(log, 0)
    segments = log.view.remote.segments()
    cache = cache_of(log.directory)
    prefix = f"{_ID.hex()}/0"
    picker = random.Random(22)
    died = found = 0
    for _ in range(40):

        def bring():
            stats = SharedStats(str(tmp_path))
            fetcher = ChunkFetcher(FileStore(tmp_path / "store"), cache, 4_000, stats)
            kill_at_line(picker.randrange(50, 3_000))
            while True:
                for segment in segments:
                    for chunk in range(-(-segment.size // 128)):
                        assert fetcher.fetch(prefix, segment, chunk)
                    fetcher.remove_evicted()

        died += fork(bring) == -signal.SIGKILL
        picker.random()
        for offset in range(0, segments[-1].next_base, 3):
            try:
                region = log.reader.read(offset, 1, min_one_batch=True)
            except RemotePendingError:
                continue
            found += 1
            assert content(region) in whole
    assert died == 40 and found > 40


class Interrupted:
    """A store that calls a function before its n-th change; ``left`` counts down."""

    def __init__(self, store, step, call):
        self._store = store
        self.left = step
        self._call = call

    def __getattr__(self, name):
        return getattr(self._store, name)

    def _step(self):
        self.left -= 1
        if self.left == -1:
            self._call()

    def put(self, key, content):
        self._step()
        self._store.put(key, content)

    def delete(self, keys):
        self._step()
        self._store.delete(keys)


class KilledError(BaseException):
    """The copier's end."""


def tiered_again(open_log, tiered):
    """Return a copied log that is tiered, and the plan from when it was not."""
    log = open_log(segment_bytes=3_000, **_TIERED)
    fill(log, 60)
    tiered(log)
    off = {"remote_storage_enable": False, "remote_log_delete_on_disable": True}
    untiered = open_log(row=log.row.index, segment_bytes=3_000, **{**_TIERED, **off})
    plan = _partition_plan(untiered, SimpleNamespace(name="t", topic_id=_ID), 0, 0)
    assert plan.remove_all and plan.log_start_offset == 0
    return open_log(row=log.row.index, segment_bytes=3_000, **_TIERED), plan


def retain(log):
    """Apply retention as the housekeeper does."""
    with exclusive(log.directory) as is_free:
        if is_free:
            apply_retention(log, 0)


def test_a_plan_from_before_a_topic_was_tiered_again_takes_no_record(
    open_log, tiered, store
):
    log, plan = tiered_again(open_log, tiered)
    whole = read_through(log, 0, 1 << 30)
    retain(log)
    assert len(bases(log)) == 1
    RemotePartition(store, "t", _ID, 0).run(plan)
    assert log.lookup.earliest() == 0
    assert read_through(log, 0, 1 << 30) == whole


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("step", range(5))
def test_retention_amid_a_removal_of_all_copies_takes_no_record(
    open_log, tiered, store, step, is_killed
):
    log, plan = tiered_again(open_log, tiered)
    whole = read_through(log, 0, 1 << 30)

    def interrupt():
        retain(log)
        if is_killed:
            raise KilledError

    with suppress(KilledError):
        interrupted = Interrupted(store, step, interrupt)
        RemotePartition(interrupted, "t", _ID, 0).run(plan)
    assert read_through(log, 0, 1 << 30) == whole
    on = plan._replace(remove_all=False, copy_below=bases(log)[-1])
    RemotePartition(store, "t", _ID, 0).run(on)
    retain(log)
    assert len(bases(log)) == 1
    assert read_through(log, 0, 1 << 30) == whole
