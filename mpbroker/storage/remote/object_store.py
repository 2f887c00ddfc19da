"""ObjectStore: put, read and delete objects in S3, GCS, Azure, or in a directory.

A thin layer over `obstore`, which brings requests, signatures, retries and multipart
uploads. This module adds error messages that say what an operator has to change. It is
imported only if a URL of a store is set.

Methods block, except those that are coroutines. Several threads may call them: obstore
releases the GIL.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from hashlib import md5
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import LocalStore, from_url

from mpbroker.base.directories import sync_directory
from mpbroker.base.storage_errors import (
    RemoteObjectMissingError,
    RemoteStorageError,
    RemoteUnreachableError,
    UnconditionalStoreError,
)
from mpbroker.base.store_url import StoreUrl

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

# From 8 MiB on a file goes up in parts. Four parts at a time hold 32 MiB of memory.
_PART_BYTES: Final = 8 * 1024 * 1024
_PARTS_AT_ONCE: Final = 4
# The largest object that is read into memory as a whole, if the reader does not know
# its size. A manifest with 500,000 segments has about as much.
_MOST_BYTES: Final = 64 * 1024 * 1024
_DELETE_AT_ONCE: Final = 1000  # the limit of one DeleteObjects request
# The error code in a store's response, or in obstore's message about one of several
# objects to delete.
_CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>|\(code: (\w{1,64})\)")
# Errors after which the store may serve the same request later: it is away, overloaded,
# or full.
_PASSING: Final = re.compile(r"HTTP error|status code: (?:5\d\d|408|429) ")
# Explanations for operators, by the error code of an S3 server.
_ADVICE: Final[Mapping[str, str]] = {
    "InvalidAccessKeyId": "the store does not know the access key",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    "ExpiredToken": "the credentials have expired",
    "NoSuchBucket": "there is no such bucket: create it",
    "AccessDenied": "the credentials have no right to do this",
    "SlowDown": "the store has too many requests",
    "XMinioStorageFull": "the store is full",
}
_S3: Final = ("s3", "s3a")
# What S3 and stores like it call an object: the MD5 of its content; of one that came in
# parts the MD5 of the parts' MD5s, and their number. Others have ETags of other forms.
# Source: Amazon S3 User Guide, "Checking object integrity".
_MD5_ETAG: Final = re.compile(r'"?([0-9a-f]{32}(-\d+)?)"?')


class ObjectStore:
    """The objects below one URL.

    Args:
        url: such as `s3://bucket/prefix`, `gs://`, `az://` or `file:///directory`, with
            the options of StoreUrl. Credentials are taken from the usual variables of
            the environment (AWS_ACCESS_KEY_ID, ...), and so are endpoint and region
            (AWS_ENDPOINT_URL, ...) if the URL does not name them.
        retry_s: the time in seconds for which a failed request is tried again.
        retries: the largest number of further attempts; the time between them doubles,
            with a random part.

    Raises:
        RemoteStorageError: the URL or a variable is wrong, or a directory is missing.
    """

    def __init__(self, url: str, *, retry_s: float = 30.0, retries: int = 5) -> None:
        try:
            place = StoreUrl.parse(url)
        except ValueError as error:
            raise RemoteStorageError(f"{url} cannot be used: {error}") from error
        self.url = place.url
        self._large = Lock()
        self._has_other_etags = False  # than MD5s of what was written
        # Of a store in a directory, without a slash at the end; "": it is another one.
        self._root = urlsplit(url).path.rstrip("/") if place.scheme == "file" else ""
        endpoint = place.endpoint
        if not endpoint and place.scheme in _S3:
            endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
        client: ClientConfig = {"connect_timeout": "5s", "timeout": "30s"}
        if endpoint.startswith("http://"):
            client["allow_http"] = True  # the operator has named it
        config: dict[str, Any] = {}
        if place.endpoint:
            config["base_url" if place.scheme == "gs" else "endpoint"] = endpoint
        if place.region:
            config["region"] = place.region
        retry: RetryConfig = {
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=retry_s),
        }
        try:
            if place.scheme == "file":
                self._store: Any = LocalStore(urlsplit(url).path)
            else:
                self._store = from_url(
                    place.url,
                    config=config or None,  # type: ignore[arg-type]
                    client_options=client,
                    retry_config=retry,
                )
        except (BaseError, OSError, ValueError) as error:
            raise self._error("cannot be used", error) from error

    def put(self, key: str, content: bytes) -> None:
        """Write an object, or replace it: readers see the old or the new content.

        Raises:
            RemoteStorageError: the object may have been written nevertheless, or the
                store has other bytes than were sent.
        """
        try:
            told = obstore.put(self._store, key, content, use_multipart=False)
            self._force_to_disk(key)
        except (BaseError, OSError) as error:
            raise self._error(f"cannot write {key}", error) from error
        if not (self._root or self._has_other_etags):
            sent = _Digests(max(1, len(content)))
            sent.add(content)
            self._compare(key, told["e_tag"], sent)

    async def put_async(self, key: str, content: bytes) -> None:
        """Do as ``put`` does, without blocking, and without comparing checksums.

        If the coroutine is cancelled, it keeps no reference to the content.
        """
        try:
            await obstore.put_async(self._store, key, content, use_multipart=False)
            if self._root:
                await asyncio.to_thread(self._force_to_disk, key)
        except (BaseError, OSError) as error:
            raise self._error(f"cannot write {key}", error) from error

    def create(self, key: str, content: bytes) -> bool:
        """Write an object if none of this key exists; return whether it was written.

        Raises:
            UnconditionalStoreError: the store says that it cannot do this.
            RemoteStorageError: the object may have been written nevertheless.
        """
        try:
            obstore.put(self._store, key, content, mode="create", use_multipart=False)
            self._force_to_disk(key)
        except (AlreadyExistsError, FileExistsError):
            return False
        except (NotSupportedError, NotImplementedError) as error:
            raise UnconditionalStoreError(self.url) from error
        except (BaseError, OSError) as error:
            raise self._error(f"cannot write {key}", error) from error
        return True

    def put_stream(self, key: str, chunks: Iterator[bytes], size: int) -> None:
        """Write an object whose content is all chunks together; a large one in parts.

        Parts take memory, so threads write one large object at a time.

        Args:
            key: the object's key.
            chunks: the content.
            size: the length of the content in bytes, of which an estimate will do.

        Raises:
            RemoteStorageError: as ``put``.
            Exception: the exception that ``chunks`` has raised; no object was written.
        """
        failed: list[Exception] = []
        sent = None if self._root or self._has_other_etags else _Digests(_PART_BYTES)

        def watched() -> Iterator[bytes]:
            try:
                for chunk in chunks:
                    if sent is not None:
                        sent.add(chunk)
                    yield chunk
            except Exception as error:
                failed.append(error)
                raise

        try:
            with self._large if size > _PART_BYTES else nullcontext():
                told = obstore.put(
                    self._store,
                    key,
                    watched(),
                    chunk_size=_PART_BYTES,
                    max_concurrency=_PARTS_AT_ONCE,
                )
            self._force_to_disk(key)
        except (BaseError, OSError) as error:
            if failed:
                raise failed[0] from None
            raise self._error(f"cannot write {key}", error) from error
        if sent is not None:
            self._compare(key, told["e_tag"], sent)

    def _compare(self, key: str, told: str | None, sent: _Digests) -> None:
        """Compare the ETag of an object that was written with what was sent.

        If the ETag is no MD5, it says nothing about the content. If it is another MD5,
        the content is read and decides: a store that encrypts with keys of its own, or
        cuts parts in another way, has such ETags, and is not asked for them again.

        Raises:
            RemoteStorageError: the store has other bytes than were sent, or cannot be
                read.
        """
        found = _MD5_ETAG.fullmatch(told or "")
        if found is not None and found[1] in sent.etags():
            return
        if found is not None and not self._has_other_etags:
            for place, length, digest in sent.parts():
                content = self.get_range(key, place, length)
                if md5(content, usedforsecurity=False).digest() != digest:
                    raise RemoteStorageError(
                        f"{self.url}: {key} has other bytes than were sent"
                    )
        self._has_other_etags = True

    def _force_to_disk(self, key: str) -> None:
        """Force an object of a store in a directory to disk, with all of its names.

        A broker removes its own copy of what the store has, so the store must have it
        after a power cut, too. Other stores see to this themselves.

        Raises:
            OSError: the disk failed.
        """
        if not self._root:
            return
        path = f"{self._root}/{key}"
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        while path != self._root:  # the directories above it may be new, too
            path = os.path.dirname(path)
            try:
                sync_directory(path)
            except OSError as error:
                if error.errno != errno.EINVAL:  # some network file systems lack this
                    raise

    def size(self, key: str) -> int:
        """Return an object's size in bytes; raises as ``get``."""
        try:
            return int(obstore.head(self._store, key)["size"])
        except FileNotFoundError as error:
            raise self._missing(key, error) from error
        except (BaseError, OSError) as error:
            raise self._error(f"cannot read {key}", error) from error

    def get(self, key: str, most: int = _MOST_BYTES) -> bytes:
        """Return an object's content.

        Args:
            key: the object's key.
            most: the largest size in bytes; a larger object is not read.

        Raises:
            RemoteObjectMissingError: there is no such object.
            RemoteStorageError: the store cannot be read now, or the object is larger.
        """
        try:
            found = obstore.get(self._store, key)
            size = int(found.meta["size"])
            if size > most:
                raise RemoteStorageError(
                    f"{self.url}: {key} has {size} bytes, and {most} at most were"
                    " written: its content is not what the broker wrote"
                )
            return bytes(found.bytes())
        except FileNotFoundError as error:
            raise self._missing(key, error) from error
        except (BaseError, OSError) as error:
            raise self._error(f"cannot read {key}", error) from error

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes of an object from ``start`` on, fewer at its end.

        Raises:
            As ``get``.
        """
        try:
            found = obstore.get_range(self._store, key, start=start, length=length)
            return bytes(found)
        except FileNotFoundError as error:
            raise self._missing(key, error) from error
        except (BaseError, OSError) as error:
            raise self._error(f"cannot read {key}", error) from error

    async def get_ranges_async(
        self, key: str, ranges: Sequence[tuple[int, int]]
    ) -> list[memoryview]:
        """Return some ranges of an object, without blocking.

        Ranges that lie close together are read by one request.

        Args:
            key: the object's key.
            ranges: (position of the first byte, length) of each range, in bytes; no
                length is 0.

        Raises:
            As ``get``. If the object ends within a range, this may raise an error, or
            return fewer bytes for the range.
        """
        try:
            found = await obstore.get_ranges_async(
                self._store,
                key,
                starts=[start for start, _ in ranges],
                lengths=[length for _, length in ranges],
            )
        except FileNotFoundError as error:
            raise self._missing(key, error) from error
        except (BaseError, OSError) as error:
            raise self._error(f"cannot read {key}", error) from error
        return [memoryview(each) for each in found]

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. It is no error if some of them do not exist.

        Raises:
            RemoteStorageError: some of them may still exist.
        """
        if isinstance(self._store, LocalStore):
            for key in keys:
                self._delete([key])
                self._remove_staged(key)
            return
        for first in range(0, len(keys), _DELETE_AT_ONCE):
            self._delete(keys[first : first + _DELETE_AT_ONCE])

    def _delete(self, keys: Sequence[str]) -> None:
        try:
            obstore.delete(self._store, keys)
        except FileNotFoundError:
            pass  # only the store in a directory raises this; others report success
        except (BaseError, OSError) as error:
            raise self._error(f"cannot delete {keys[0]}", error) from error

    def _remove_staged(self, key: str) -> None:
        """Remove the files that killed uploads of an object to a directory have left.

        An object is written to `KEY#1`, or `#2` if there is one, and renamed at last.
        """
        for number in count(1):
            try:
                os.unlink(f"{self._root}/{key}#{number}")
            except FileNotFoundError:
                return
            except OSError as error:
                raise self._error(f"cannot delete {key}", error) from error

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the keys of all objects below a prefix; raises RemoteStorageError."""
        try:
            for some in obstore.list(self._store, prefix=prefix):
                for entry in some:
                    yield entry["path"]
        except (BaseError, OSError) as error:
            raise self._error(f"cannot list {prefix}", error) from error

    def _missing(self, key: str, error: BaseException) -> RemoteStorageError:
        if "NoSuchBucket" in str(error):
            return self._error(f"cannot read {key}", error)
        return RemoteObjectMissingError(f"{self.url} has no object {key}")

    def _error(self, what: str, error: BaseException) -> RemoteStorageError:
        if isinstance(error, GenericError) and _PASSING.search(str(error)):
            return RemoteUnreachableError(f"{self.url} {what}: {_explain(error)}")
        return RemoteStorageError(f"{self.url} {what}: {_explain(error)}")


class _Digests:
    """The MD5 digests of an object that is sent, from which its ETag follows.

    Args:
        part_bytes: the size of the parts that are sent; the last one may be smaller.
    """

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = part_bytes
        self._size = 0
        self._digests: list[bytes] = []  # of the parts that are complete
        self._part = md5(usedforsecurity=False)

    def add(self, chunk: bytes) -> None:
        """Add the bytes that are sent next."""
        rest = memoryview(chunk)
        while rest:
            taken = rest[: self._part_bytes - self._size % self._part_bytes]
            self._part.update(taken)
            self._size += len(taken)
            rest = rest[len(taken) :]
            if self._size % self._part_bytes == 0:
                self._digests.append(self._part.digest())
                self._part = md5(usedforsecurity=False)

    def parts(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield position and length in bytes, and digest, of each part."""
        for number, digest in enumerate(self._all()):
            place = number * self._part_bytes
            yield place, min(self._part_bytes, self._size - place), digest

    def etags(self) -> tuple[str, ...]:
        """Return the ETags that the object may have."""
        digests = self._all()
        of_all = md5(b"".join(digests), usedforsecurity=False).hexdigest()
        in_parts = f"{of_all}-{len(digests)}"
        return (digests[0].hex(), in_parts) if len(digests) == 1 else (in_parts,)

    def _all(self) -> list[bytes]:
        if self._digests and self._size % self._part_bytes == 0:
            return self._digests
        return [*self._digests, self._part.digest()]


def _explain(error: BaseException) -> str:
    """Return a store's error as one line for operators, without secrets."""
    text = str(error)
    found = _CODE.search(text)
    if found is not None:
        code = found[1] or found[2]
        return f"{_ADVICE.get(code, 'the store refused')} ({code})"
    if isinstance(error, UnauthenticatedError):
        return "the store wants other credentials"
    if isinstance(error, PermissionDeniedError):
        return _ADVICE["AccessDenied"]
    return text.split("\n", 1)[0][:300]
