"""Paths as Spark's users spell them lead where pyarrow finds them."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyarrow import fs

from mpbroker.spark.checkpoint import query_id
from mpbroker.spark.file_systems import absolute, find


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        ("/lake/c", "/lake/c"),
        ("/lake/c/", "/lake/c"),
        ("lake", "lake"),
        ("/", "/"),
        ("file:/lake/c", "/lake/c"),
        ("file:///lake/c/", "/lake/c"),
        ("FILE:/", "/"),
        ("with:colon/c", "with:colon/c"),
    ],
)
def test_paths_here_are_plain_or_hadoops_or_uris(path, inside):
    files, found = find(path)
    assert isinstance(files, fs.LocalFileSystem)
    assert found == inside


@pytest.mark.parametrize("scheme", ["s3", "s3a", "s3n", "S3A"])
def test_an_object_store_has_hadoops_names_too(scheme):
    # Whoever names region and endpoint is not asked for them: nothing is dialled.
    place = "?region=eu-west-1&endpoint_override=127.0.0.1:9"
    files, found = find(f"{scheme}://bucket/lake/c{place}")
    assert isinstance(files, fs.S3FileSystem)
    assert files.region == "eu-west-1"
    assert found == "bucket/lake/c"


def test_a_uri_of_an_unknown_kind_is_refused():
    with pytest.raises(pa.ArrowInvalid, match="gopher"):
        find("gopher://host/x")


def test_a_checkpoint_says_whose_it_is_or_that_it_is_none(tmp_path):
    def ask():
        return query_id(*find(f"file:{tmp_path}/"))

    assert ask() is None
    (tmp_path / "metadata").write_text('{"id":"q-1"}')
    assert ask() == "q-1"
    for content in ("", "[]", '{"id":1}'):
        (tmp_path / "metadata").write_text(content)
        with pytest.raises(
            ValueError, match="metadata is not the metadata of a Spark query"
        ):
            ask()


def test_a_path_means_the_same_to_executors_that_run_elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert absolute("lake/c/") == f"{tmp_path}/lake/c"
    assert absolute("~/lake") == "/home/me/lake"
    for path in ("/lake/c", "s3://bucket/lake", "file:/lake"):
        assert absolute(path) == path
