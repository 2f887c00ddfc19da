"""Read the id of a query from its checkpoint directory."""

from __future__ import annotations

from typing import Final

import orjson
from pyarrow import fs

_METADATA: Final = "metadata"


def query_id(files: fs.FileSystem, directory: str) -> str | None:
    """Return the id that Spark gave a query; None before Spark has written it.

    Args:
        directory: the checkpoint's path in the file system.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not Spark's metadata.
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
        raise ValueError(f"{path} is not the metadata of a Spark query: it has no id")
    return str(content["id"])
