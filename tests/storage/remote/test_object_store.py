"""The store client: what it writes can be read, and a mistake is told in one line."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import uuid

import pytest

from mpbroker.base.storage_errors import (
    RemoteObjectMissingError,
    RemoteStorageError,
    RemoteUnreachableError,
    UnconditionalStoreError,
)
from mpbroker.base.store_url import StoreUrl
from mpbroker.storage.remote import object_store
from mpbroker.storage.remote.object_store import ObjectStore
from mpbroker.storage.remote.store_owner import (
    NotOwnerError,
    StoreOwner,
    check_rights,
    claim,
)
from tests.support.canned_s3 import canned_s3
from tests.support.other_stores import SERVERS
from tests.support.store_proxy import Fault, StoreProxy, always, none

ALL = pytest.mark.parametrize("store_url", ["file", "s3", *SERVERS], indirect=True)


@ALL
def test_what_is_written_is_read_listed_and_deleted(store):
    large = os.urandom(9 * 1024 * 1024)  # two parts
    chunks = (large[at : at + 4_000_000] for at in range(0, len(large), 4_000_000))
    store.put_stream("id/0/large.log", chunks, 9_000_000)
    store.put("id/0/manifest", b"one")
    store.put("id/0/manifest", b"two")
    assert store.size("id/0/large.log") == len(large)
    assert store.get_range("id/0/large.log", 8_000_000, 1000) == large[8000000:8001000]
    assert store.get_range("id/0/large.log", len(large) - 5, 1000) == large[-5:]
    assert store.get("id/0/manifest") == b"two"
    assert sorted(store.list("id/0")) == ["id/0/large.log", "id/0/manifest"]
    store.delete(["id/0/large.log", "id/0/never-there", "id/0/manifest"])
    assert not list(store.list("id/0"))
    for read in (store.get, store.size):
        with pytest.raises(RemoteObjectMissingError, match=r"has no object id/0"):
            read("id/0/manifest")


LARGE = os.urandom(9 * 1024 * 1024)  # two parts


def cut(content):
    """Chunks that end elsewhere than parts do."""
    return (content[at : at + 4_000_000] for at in range(0, len(content), 4_000_000))


@pytest.mark.parametrize("store_url", ["file", "s3", "versitygw"], indirect=True)
def test_the_checksum_of_what_was_written_is_compared_without_reading(
    store, monkeypatch
):
    """SeaweedFS tells MD5s; a directory tells none, and none is made for it."""
    monkeypatch.setattr(store, "get_range", pytest.fail)
    if store.url.startswith("file"):
        monkeypatch.setattr(object_store, "md5", pytest.fail)
    store.put("id/0/manifest", b"")
    for content in (LARGE, LARGE[: 8 << 20], b"abc"):
        store.put_stream("id/0/a.log", cut(content), len(content))
        store.put("id/0/a.indexes", content)
    assert not store._has_other_etags


def spoiled(method, path):
    return Fault("spoiled", spoil=True) if method == "PUT" else None


@pytest.mark.parametrize("server", ["seaweedfs", "canned"])
def test_bytes_that_change_on_their_way_to_the_store_are_no_copy(
    server, request, monkeypatch
):
    with contextlib.ExitStack() as running:
        if server == "seaweedfs":
            found = request.getfixturevalue("seaweedfs").environ
        else:
            found = running.enter_context(canned_s3(lambda *_: None, etag=hex_md5))
        for name, value in found.items():
            monkeypatch.setenv(name, value)
        proxy = running.enter_context(StoreProxy(found["AWS_ENDPOINT_URL"], spoiled))
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = ObjectStore(f"s3://lake/{uuid.uuid4().hex}", retry_s=1, retries=0)
        says = "other bytes than were sent"
        with pytest.raises(RemoteStorageError, match=says):
            store.put("id/0/a.indexes", b"content")
        if server == "seaweedfs":
            for content in (LARGE, b"content"):
                with pytest.raises(RemoteStorageError, match=says):
                    store.put_stream("id/0/a.log", cut(content), len(content))
        proxy.choose = none
        store.put("id/0/a.indexes", b"content")
        assert store.get("id/0/a.indexes") == b"content"


def hex_md5(content):
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


@pytest.mark.parametrize(
    ("etag", "reads"),
    [
        (lambda content: hex_md5(b"secret" + content), 1),  # encrypted by a key
        (lambda content: f"0x8DC{len(content)}", 0),
    ],
)
def test_a_store_with_other_etags_keeps_what_it_was_given(monkeypatch, etag, reads):
    """It is asked for the content once."""
    asked = []
    with canned_s3(lambda *request: asked.append(request[0]), etag) as environ:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        store = ObjectStore("s3://bucket/prefix", retry_s=1, retries=0)
        for number in range(3):
            store.put(f"key{number}", b"content")
    assert asked.count("GET") == reads
    assert asked.count("PUT") == 3


_DYING = """
import os, signal, sys
from mpbroker.storage.remote.object_store import ObjectStore

def content():
    for _ in range(5):
        yield bytes(5_000_000)
    os.kill(os.getpid(), signal.SIGKILL)
    yield b""

ObjectStore(sys.argv[1]).put_stream("id/0/a.log", content(), 0)
"""


def test_an_upload_to_a_directory_that_was_killed_leaves_no_file(store, tmp_path):
    def left():
        return [path for path in (tmp_path / "store").rglob("*") if path.is_file()]

    for _ in range(2):
        command = [sys.executable, "-c", _DYING, store.url]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert len(left()) == 2  # in the way of the library
    assert not list(store.list(""))
    store.delete(["id/0/a.log", "id/0/a.indexes"])
    assert not left()


@ALL
def test_an_object_that_is_larger_than_what_was_written_is_not_read(store):
    store.put("owner", bytes(100))
    assert store.get("owner", 100) == bytes(100)
    with pytest.raises(RemoteStorageError, match="owner has 100 bytes, and 99 at most"):
        store.get("owner", 99)


@pytest.fixture
def forced(monkeypatch):
    """The paths that were forced to disk, in this order."""
    paths = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: paths.append(os.readlink(f"/proc/self/fd/{fd}"))
    )
    return paths


@pytest.mark.parametrize(
    "put",
    [
        lambda store, key: store.put(key, b"x"),
        lambda store, key: store.create(key, b"x"),
        lambda store, key: store.put_stream(key, iter([b"x"]), 1),
        lambda store, key: asyncio.run(store.put_async(key, b"x")),
    ],
    ids=["put", "create", "stream", "async"],
)
def test_an_object_in_a_directory_is_on_disk_with_all_its_names(
    store, tmp_path, forced, put
):
    put(store, "id/0/manifest")
    root = tmp_path / "store"
    assert forced == list(
        map(str, [root / "id/0/manifest", root / "id/0", root / "id", root])
    )


@ALL
def test_objects_are_written_and_read_without_blocking(store):
    content = os.urandom(3_000_000)
    key = "ab/one"

    async def use() -> None:
        await store.put_async(key, content)
        ranges = [(0, 10), (2_999_990, 10), (5, 1)]
        found = await store.get_ranges_async(key, ranges)
        assert [bytes(each) for each in found] == [
            content[start : start + size] for start, size in ranges
        ]
        with pytest.raises(RemoteObjectMissingError, match=r"has no object ab/two"):
            await store.get_ranges_async("ab/two", [(0, 1)])
        # The object is shorter than it was said to be: fewer bytes, or an error.
        try:
            (short,) = await store.get_ranges_async(key, [(2_999_990, 20)])
        except RemoteStorageError:
            pass
        else:
            assert bytes(short) == content[-10:]

    asyncio.run(use())


@ALL
def test_a_place_belongs_to_the_first_broker_that_claims_it(store):
    check_rights(store)
    claim(store, StoreOwner("first", 1))
    claim(store, StoreOwner("first", 1))
    with pytest.raises(NotOwnerError, match=r"belongs to .*first node.id=1"):
        claim(store, StoreOwner("second", 1))
    with pytest.raises(NotOwnerError):
        claim(store, StoreOwner("first", 2))
    assert sorted(store.list("")) == ["owner"]


@ALL
def test_an_object_is_created_once(store):
    assert store.create("one", b"first")
    assert not store.create("one", b"second")
    assert store.get("one") == b"first"


@ALL
def test_a_store_that_ignores_the_condition_is_refused(store, monkeypatch):
    def ignoring(self, key, content):
        self.put(key, content)
        return True

    monkeypatch.setattr(ObjectStore, "create", ignoring)
    for _ in range(2):  # the owner's later starts too
        with pytest.raises(UnconditionalStoreError, match=r"no conditional writes"):
            claim(store, StoreOwner("first", 1))
    with pytest.raises(NotOwnerError, match=r"first node.id=1"):
        claim(store, StoreOwner("second", 1))


@pytest.mark.parametrize("store_url", ["s3"], indirect=True)
def test_a_store_that_is_known_to_lack_conditions_is_refused(store_url, monkeypatch):
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    store = ObjectStore(store_url, retry_s=1)
    with pytest.raises(UnconditionalStoreError, match=r"no conditional writes"):
        claim(store, StoreOwner("first", 1))
    assert not list(store.list(""))


@pytest.mark.parametrize("store_url", ["s3"], indirect=True)
@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("AWS_ACCESS_KEY_ID", "nobody", "does not know the access key"),
        ("AWS_SECRET_ACCESS_KEY", "wrong", "secret key does not belong"),
    ],
)
def test_wrong_credentials_are_told_and_not_shown(
    store_url, monkeypatch, name, value, says
):
    monkeypatch.setenv(name, value)
    with pytest.raises(RemoteStorageError, match=says) as error:
        check_rights(ObjectStore(store_url, retry_s=1))
    assert "\n" not in str(error.value)
    assert "lake-secret" not in str(error.value)


def test_a_bucket_that_is_missing_is_told(seaweedfs, monkeypatch):
    for name, value in seaweedfs.environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RemoteStorageError, match=r"no such bucket"):
        # SeaweedFS makes the bucket of a PUT whose sender may do so.
        list(ObjectStore("s3://no-bucket-of-ours/x", retry_s=1).list(""))


@pytest.mark.parametrize("store_url", ["s3"], indirect=True)
def test_a_url_names_its_server_and_region(store_url, seaweedfs, monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    endpoint, region = seaweedfs.endpoint, seaweedfs.environ["AWS_REGION"]
    store = ObjectStore(f"{store_url}?endpoint={endpoint}&region={region}", retry_s=1)
    store.put("a", b"bytes")
    assert store.get("a") == b"bytes"
    assert store.url == store_url
    # It counts before the environment.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert ObjectStore(str(StoreUrl(store_url, endpoint, region))).size("a") == 5


def test_a_store_that_is_away_is_told_in_one_line(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    with pytest.raises(RemoteUnreachableError, match=r"s3://away/x cannot") as error:
        ObjectStore("s3://away/x", retry_s=0.2).get("owner")
    assert "\n" not in str(error.value) and "hidden" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        *(
            "file:///nowhere/at/all",
            "nothing://x",
            "s3:",
            "s3://x/y?endpoint=host:9000",
        ),
        *("s3://x/y?bucket=z", "gs://x/y?region=z", "s3://user:secret@x/y"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url):
    with pytest.raises(RemoteStorageError, match=r"cannot be used"):
        ObjectStore(url)


@ALL
def test_a_stream_that_ends_in_an_error_leaves_no_object(store):
    def broken():
        yield b"x" * 9_000_000
        raise OSError(5, "the disk failed")

    with pytest.raises(OSError, match=r"the disk failed"):
        store.put_stream("broken", broken(), 9_000_000)
    with pytest.raises(RemoteObjectMissingError):
        store.size("broken")


def test_calls_that_do_not_block_tell_the_same(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")

    async def use() -> None:
        store = ObjectStore("s3://bucket/x", retry_s=0)
        with pytest.raises(RemoteUnreachableError, match="cannot write one"):
            await store.put_async("one", b"x")
        with pytest.raises(RemoteUnreachableError, match="cannot read one"):
            await store.get_ranges_async("one", [(0, 1)])

    asyncio.run(use())


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("500", "InternalError"),
        ("503", "ServiceUnavailable"),
        ("SlowDown", "too many requests"),
        ("429", "TooManyRequests"),
        ("full", "the store is full"),
        ("refused", "error sending request"),
        ("expired", "credentials have expired"),
    ],
)
def test_a_failure_that_passes_is_told_from_one_that_does_not(monkeypatch, fault, says):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "x")
    with StoreProxy("http://127.0.0.1:1", always(fault)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = ObjectStore("s3://bucket/prefix", retry_s=1, retries=0)
        with pytest.raises(RemoteStorageError, match=says) as told:
            store.get("key")
    passes = isinstance(told.value, RemoteUnreachableError)
    assert passes == (fault != "expired")
