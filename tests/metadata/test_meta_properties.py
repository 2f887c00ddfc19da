"""meta.properties: a data directory belongs to one broker of one cluster."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.base.storage_errors import LogDirectoryError
from mpbroker.metadata.meta_properties import (
    open_data_directories,
    random_uuid,
    read_meta_properties,
    uuid_of_text,
    uuid_to_text,
)


def test_new_directories_get_one_identity_and_keep_it(tmp_path):
    paths = [str(tmp_path / "a"), str(tmp_path / "deep" / "b")]
    cluster_id = open_data_directories(paths, 1)
    assert len(cluster_id) == 22
    assert open_data_directories(paths, 1) == cluster_id
    first, second = (read_meta_properties(path) for path in paths)
    assert (first.cluster_id, first.node_id) == (cluster_id, 1)
    assert first.directory_id != second.directory_id


def test_a_directory_added_later_joins_the_cluster(tmp_path):
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    cluster_id = open_data_directories(paths[:1], 1)
    assert open_data_directories(paths, 1) == cluster_id


def test_kafkas_own_file_is_understood(tmp_path):
    (tmp_path / "meta.properties").write_text(
        "#\n#Thu Jan 01 00:00:00 UTC 2026\ncluster.id=5L6g3nShT-eMCtK--X86sw\n"
        "directory.id=abc\nnode.id=3\nversion=1\n"
    )
    assert open_data_directories([str(tmp_path)], 3) == "5L6g3nShT-eMCtK--X86sw"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (
            "version=1\nnode.id=2\ncluster.id=x\n",
            "belongs to node.id=2, but node.id is",
        ),
        ("version=0\nnode.id=1\ncluster.id=x\n", "version=0; this release knows"),
        ("version=1\nnode.id=1\n", "missing or malformed"),
        ("version=1\nnode.id=x\ncluster.id=x\n", "missing or malformed"),
        ("", "version=None"),
    ],
)
def test_a_foreign_or_broken_directory_is_refused(tmp_path, content, complaint):
    (tmp_path / "meta.properties").write_text(content)
    with pytest.raises(LogDirectoryError, match=complaint):
        open_data_directories([str(tmp_path)], 1)


def test_directories_of_two_clusters_are_refused(tmp_path):
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    for path in paths:
        open_data_directories([path], 1)
    with pytest.raises(LogDirectoryError, match="belong together"):
        open_data_directories(paths, 1)


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LogDirectoryError, match=r"log\.dirs: cannot"):
        open_data_directories([str(tmp_path / "file" / "sub")], 1)


@given(st.binary(min_size=16, max_size=16))
def test_an_id_survives_being_written(uuid):
    assert uuid_of_text(uuid_to_text(uuid)) == uuid


@given(st.text(max_size=30))
def test_any_text_is_an_id_or_a_value_error(text):
    try:
        assert uuid_to_text(uuid_of_text(text)) == text
    except ValueError:
        pass


def test_random_ids_are_never_kafkas_reserved_ones(monkeypatch):
    sequence = iter([bytes(16), bytes(15) + b"\1", b"\xf8" * 16, b"x" * 16])
    monkeypatch.setattr(os, "urandom", lambda size: next(sequence))
    assert random_uuid() == b"x" * 16
