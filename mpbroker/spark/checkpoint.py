"""What Spark notes of a query in its checkpoint."""

from __future__ import annotations

from typing import Final

import orjson
from pyarrow import fs

_METADATA: Final = "metadata"


def query_id(files: fs.FileSystem, directory: str) -> str | None:
    """Return the id that Spark gave a checkpoint, None while it has none.

    Args:
        directory: the checkpoint's, in the file system.

    Raises:
        OSError: it cannot be read.
        ValueError: what is there is none of Spark's.
    """
    path = f"{directory}/{_METADATA}"
    if files.get_file_info(path).type != fs.FileType.File:
        return None
    with files.open_input_stream(path) as stream:
        text = stream.read()
    try:
        content = orjson.loads(text)
    except orjson.JSONDecodeError:
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("id"), str):
        raise ValueError(f"{path} names no query")
    return str(content["id"])
