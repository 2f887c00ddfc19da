"""Manifests: what is read is what was written, and any damage is noticed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.storage.remote.remote_manifest import (
    ManifestError,
    RemoteManifest,
    RemoteSegment,
    SegmentIndexes,
    SegmentState,
    floor,
)


def segment(base: int, state: int = SegmentState.COPIED) -> RemoteSegment:
    return RemoteSegment(base, base + 10, f"{base:032x}", state, 100, 5, 7, 9)


INDEXES = SegmentIndexes((1, 2**32 - 1), {".index": b"\x00\x01"}, b"0\n1\n0 0\n")


def test_what_is_read_is_what_was_written():
    manifest = RemoteManifest(
        "t", (segment(0), segment(10, SegmentState.COPYING)), 9, "id/0"
    )
    assert RemoteManifest.decode(manifest.encode()) == manifest
    assert SegmentIndexes.decode(INDEXES.encode()) == INDEXES


@given(st.data())
def test_any_damage_is_noticed(data):
    cls, whole = data.draw(
        st.sampled_from(
            [
                (RemoteManifest, RemoteManifest("t", (segment(0),)).encode()),
                (SegmentIndexes, INDEXES.encode()),
            ]
        )
    )
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytes([whole[at] ^ data.draw(st.integers(1, 255))])
    for damaged in (whole[:at], whole[:at] + flipped + whole[at + 1 :]):
        with pytest.raises(ManifestError):
            cls.decode(damaged)


def test_only_copied_segments_count():
    manifest = RemoteManifest("t").with_segment(segment(10, SegmentState.COPYING))
    assert manifest.copied_to() == -1
    manifest = manifest.with_segment(segment(0))
    assert manifest.copied_to() == 10
    manifest = manifest.with_segment(segment(10))
    assert manifest.copied_to() == 20 and len(manifest.segments) == 2
    manifest = manifest.with_segment(segment(0, SegmentState.DELETING))
    assert [s.base_offset for s in manifest.copied()] == [10]
    assert manifest.without({segment(10).segment_id}).copied_to() == -1


def test_the_segment_of_an_offset_is_found():
    segments = [segment(10), segment(20)]
    assert [floor(segments, o) for o in (9, 10, 19, 20, 99)] == [-1, 0, 0, 1, 1]
