"""Read the id of a query, and the offsets of a batch, from Spark's checkpoint."""

from __future__ import annotations

from typing import Final

import orjson
from pyarrow import fs

_METADATA: Final = "metadata"


def query_id(files: fs.FileSystem, directory: str) -> str | None:
    """Read, from a stream's checkpoint, the id that Spark gave the stream's query.

    None: Spark has not written the id yet.

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


def has_commits(files: fs.FileSystem, directory: str) -> bool:
    """Return whether a batch of a stream's checkpoint is committed.

    Args:
        directory: the checkpoint's path in the file system.

    Raises:
        OSError: the directory cannot be read.
    """
    selector = fs.FileSelector(f"{directory}/commits", allow_not_found=True)
    return any(each.base_name.isdigit() for each in files.get_file_info(selector))


def batch_offsets(files: fs.FileSystem, directory: str, batch_id: int) -> str:
    """Return the source's end offsets of a planned batch, as JSON that Spark stored.

    Args:
        directory: the checkpoint's path in the file system.

    Raises:
        OSError: the file cannot be read.
    """
    with files.open_input_stream(f"{directory}/offsets/{batch_id}") as stream:
        lines = stream.read().decode().strip().splitlines()
    return str(lines[-1])


def batch_time_s(files: fs.FileSystem, checkpoint: str, batch_id: int) -> float:
    """Return the time at which a batch was planned, in seconds since 1970.

    A batch that runs again has the time of its first run.

    Raises:
        OSError, ValueError: the checkpoint cannot be read, or lacks the batch.
    """
    with files.open_input_stream(f"{checkpoint}/offsets/{batch_id}") as stream:
        lines = stream.read().decode().splitlines()
    try:
        return float(orjson.loads(lines[1])["batchTimestampMs"]) / 1000
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(f"offsets/{batch_id} is not Spark's: {error!r}") from None
