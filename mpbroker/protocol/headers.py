"""Read and write the headers of requests and responses.

The version of a request's header follows from the first two int16 of the request (API
key and version), so the header of an API that is not served can be read, too.

Source: Kafka protocol guide, "Headers"; KIP-482 for versions 2 and 1.
"""

from __future__ import annotations

from struct import Struct
from struct import error as StructError
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.primitives import (
    AS_JAVA,
    SHORT_TEXT,
    Buffer,
    skip_tagged_fields,
)

_NEVER: Final = 0x8000  # above every int16

# By API key: the first version whose header and body are "flexible", that is, have
# tagged fields and compact lengths.
# fmt: off
FLEXIBLE_FROM: Final = (
    9, 12, 6, 9, 4, 2, 6, 3, 8, 6,  # 0-9
    3, 6, 4, 4, 4, 5, 3, _NEVER, 3, 5,  # 10-19
    4, 2, 2, 4, 3, 3, 3, 1, 3, 2,  # 20-29
    2, 2, 4, 2, 2, 2, 2, 2, 2, 2,  # 30-39
    2, 2, 2, 2, 1, 0, 0, _NEVER, 1, 1,  # 40-49
    0, 0, 0, 1, 1, 0, 0, 0, 0, 0,  # 50-59
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  # 60-69
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  # 70-79
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  # 80-89
    0, 0, 0, 0, 0,  # 90-94
)
# fmt: on

_API_KEYS: Final = len(FLEXIBLE_FROM)

_API_VERSIONS: Final = 18
_CONTROLLED_SHUTDOWN: Final = 7

_REQUEST_V1: Final = Struct(">hhih")
_REQUEST_V0: Final = Struct(">hhi")
_INT32: Final = Struct(">i")

_read_request_v1 = _REQUEST_V1.unpack_from
_tuple_new = tuple.__new__


class RequestHeader(NamedTuple):
    """The header of a request.

    Attributes:
        api_key: the API; see ApiKey.
        api_version: the version of the API.
        correlation_id: a number that the response repeats.
        client_id: a name that the client has chosen; None: null.
        size: bytes of the header; the body begins there.
    """

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    size: int


def header_version(api_key: int, api_version: int) -> int:
    """Return the version of the header of a request: 0, 1 or 2.

    For a key that Kafka has not assigned this is 1, so that the header can be read, and
    the caller can log the key that it refuses.
    """
    if 0 <= api_key < len(FLEXIBLE_FROM) and api_version >= FLEXIBLE_FROM[api_key]:
        return 2
    if api_key == _CONTROLLED_SHUTDOWN and api_version == 0:
        return 0
    return 1


def response_header_version(api_key: int, api_version: int) -> int:
    """Return the version of the header of a response: 0 or 1.

    For ApiVersions this is always 0: a client that used a version which the broker does
    not know must be able to read the response (KIP-511).
    """
    if api_key == _API_VERSIONS:
        return 0
    return 1 if header_version(api_key, api_version) == 2 else 0


def parse_request_header(view: Buffer) -> RequestHeader:
    """Read the header at the start of a request, behind the frame length.

    This does not check whether the key and version are served.

    Raises:
        ProtocolError: the header is cut off, or its client id has more than 10,922
            bytes that are not UTF-8.
    """
    # Called for every request; it takes 0.8 us with a memoryview of shared memory.
    size = len(view)
    if size < 10:
        return _parse_short_header(view)
    api_key, api_version, correlation_id, length = _read_request_v1(view, 0)
    client_id: str | None
    if length > 0:
        position = 10 + length
        if position > size:
            return _parse_unusual_header(view)
        try:
            if length < len(SHORT_TEXT):
                text = SHORT_TEXT[length](view, 10)[0]
                client_id = text.decode("utf-8", AS_JAVA)
            else:
                client_id = str(view[10:position], "utf-8", AS_JAVA)
        except UnicodeDecodeError as error:
            raise ProtocolError(f"request header: client id: {error}") from None
    elif length == 0:
        client_id = ""
        position = 10
    else:  # any negative length is null, as in Kafka
        client_id = None
        position = 10
    if 0 <= api_key < _API_KEYS and api_version >= FLEXIBLE_FROM[api_key]:
        if position < size and not view[position]:
            position += 1
        else:
            position = skip_tagged_fields(view, position)
    elif api_key == _CONTROLLED_SHUTDOWN and api_version == 0:
        return _parse_unusual_header(view)
    return _tuple_new(
        RequestHeader, (api_key, api_version, correlation_id, client_id, position)
    )


def _parse_short_header(view: Buffer) -> RequestHeader:
    """Read the header of a request of fewer than 10 bytes.

    Only a header of version 0 may be that short.
    """
    if len(view) < _REQUEST_V0.size:
        raise ProtocolError(f"request header: {len(view)} bytes, at least 8 needed")
    return _parse_unusual_header(view)


def _parse_unusual_header(view: Buffer) -> RequestHeader:
    """Read a request header of version 0, which has no client id; refuse all others.

    Raises:
        ProtocolError: the client id is cut off.
    """
    api_key, api_version, correlation_id = _REQUEST_V0.unpack_from(view, 0)
    if header_version(api_key, api_version) == 0:
        return RequestHeader(
            api_key, api_version, correlation_id, None, _REQUEST_V0.size
        )
    if len(view) < _REQUEST_V1.size:
        raise ProtocolError(f"request header: {len(view)} bytes, at least 10 needed")
    length = _REQUEST_V1.unpack_from(view, 0)[3]
    raise ProtocolError(
        f"request header: client id of {length} bytes with {len(view) - 10} left"
    )


def encode_request_header(
    api_key: int, api_version: int, correlation_id: int, client_id: str | None
) -> bytes:
    """Return the header that a client writes before a request's body.

    Raises:
        ProtocolError: a number does not fit, or the client id exceeds 32767 bytes.
    """
    version = header_version(api_key, api_version)
    name = b"" if client_id is None else client_id.encode()
    try:
        if version == 0:
            return _REQUEST_V0.pack(api_key, api_version, correlation_id)
        length = -1 if client_id is None else len(name)
        head = _REQUEST_V1.pack(api_key, api_version, correlation_id, length)
    except StructError as error:
        raise ProtocolError(
            f"request header of key {api_key}, version {api_version}, correlation id "
            f"{correlation_id}, client id of {len(name)} bytes: {error}"
        ) from None
    return head + name + b"\0" if version == 2 else head + name


def encode_response_header(
    api_key: int, api_version: int, correlation_id: int
) -> bytes:
    """Return the header of the response to a request of this key and version."""
    if response_header_version(api_key, api_version):
        return _INT32.pack(correlation_id) + b"\0"
    return _INT32.pack(correlation_id)


def parse_response_header(
    view: Buffer, api_key: int, api_version: int
) -> tuple[int, int]:
    """Return the correlation id of a response and the size of its header.

    Args:
        view: the response, without the frame length.
        api_key: the API key of the request that it answers.
        api_version: the version of that request.

    Raises:
        ProtocolError: the header is cut off or its tagged fields are malformed.
    """
    if len(view) < _INT32.size:
        raise ProtocolError(f"response header: {len(view)} bytes, at least 4 needed")
    (correlation_id,) = _INT32.unpack_from(view, 0)
    if response_header_version(api_key, api_version):
        return correlation_id, skip_tagged_fields(view, _INT32.size)
    return correlation_id, _INT32.size
