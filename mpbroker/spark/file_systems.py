"""Find the file system of a path or URI, in Spark's spelling or pyarrow's."""

from __future__ import annotations

import os
import re
from typing import Final
from urllib.parse import parse_qsl, urlencode

from pyarrow import fs

# Hadoop's URI schemes, and pyarrow's scheme for the same file system.
_SCHEMES: Final = {"s3a": "s3", "s3n": "s3"}
_URI: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")


def find(path: str) -> tuple[fs.FileSystem, str]:
    """Return a path's file system, and the path inside it without a final slash.

    Args:
        path: a local path, or a URI: file:/x, s3://, s3a://, gs://, abfss://, hdfs://.
            A URI of S3 may have the options of StoreUrl, or pyarrow's.

    Raises:
        pyarrow.ArrowInvalid, OSError, NotImplementedError: pyarrow does not know the
            URI's scheme, or cannot connect to the file system.
    """
    match = _URI.match(path)
    if match is None:
        return fs.LocalFileSystem(), path.rstrip("/") or "/"
    scheme = match[1].lower()
    rest = path[match.end() - 1 :]
    if scheme == "file":
        return fs.LocalFileSystem(), "/" + rest.strip("/")
    rest = _options_of_arrow(rest) if scheme in ("s3", "s3a") else rest
    found, inside = fs.FileSystem.from_uri(f"{_SCHEMES.get(scheme, scheme)}:{rest}")
    return found, inside.rstrip("/") or inside


def _options_of_arrow(rest: str) -> str:
    """Name the endpoint in a URI of S3 as pyarrow does; leave other options alone."""
    path, _, query = rest.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    endpoint = options.pop("endpoint", "")
    if not endpoint:
        return rest
    scheme, _, host = endpoint.rpartition("://")
    options["endpoint_override"] = host
    options["scheme"] = scheme or "https"
    return f"{path}?{urlencode(options)}"


def absolute(path: str) -> str:
    """Make a local path absolute: executors have another working directory.

    Args:
        path: a local path, which may begin with "~"; or a URI, returned unchanged.
    """
    return path if _URI.match(path) else os.path.abspath(os.path.expanduser(path))


def replace_file(files: fs.FileSystem, path: str, content: bytes) -> None:
    """Replace a file as a whole: readers find the old content or the new one.

    Args:
        path: the file's path in the file system; its directory is created.

    Raises:
        OSError: the file cannot be written.
    """
    files.create_dir(path.rpartition("/")[0], recursive=True)
    if not isinstance(files, fs.LocalFileSystem):
        with files.open_output_stream(path) as stream:
            stream.write(content)
        return
    # Spark ignores this name. Each process has its own, in case two run by mistake.
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "wb") as file:
        file.write(content)
    os.replace(temporary, path)
