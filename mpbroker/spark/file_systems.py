"""Where a path leads, in Spark's spellings of it and in pyarrow's."""

from __future__ import annotations

import os
import re
from typing import Final

from pyarrow import fs

# Hadoop's names of what pyarrow has another name for.
_SCHEMES: Final = {"s3a": "s3", "s3n": "s3"}
_URI: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")


def find(path: str) -> tuple[fs.FileSystem, str]:
    """Return a path's file system, and the path in it, without a slash at its end.

    Args:
        path: a path here, or a URI: file:/x, s3://, s3a://, gs://, abfss://, hdfs://.

    Raises:
        pyarrow.ArrowInvalid, OSError, NotImplementedError: pyarrow knows no such URI,
            or cannot use it.
    """
    match = _URI.match(path)
    if match is None:
        return fs.LocalFileSystem(), path.rstrip("/") or "/"
    scheme = match[1].lower()
    rest = path[match.end() - 1 :]
    if scheme == "file":
        return fs.LocalFileSystem(), "/" + rest.strip("/")
    found, inside = fs.FileSystem.from_uri(f"{_SCHEMES.get(scheme, scheme)}:{rest}")
    return found, inside.rstrip("/") or inside


def absolute(path: str) -> str:
    """Return a path as it means the same to executors, which run somewhere else.

    Args:
        path: a path from here, "~" at its begin as in a shell; or a URI, left as it is.
    """
    return path if _URI.match(path) else os.path.abspath(os.path.expanduser(path))
