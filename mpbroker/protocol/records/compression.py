"""Compress and decompress the records of a batch with its four codecs, within limits.

64 MiB of zeros are 2 KB of zstd. So every decompression here has a limit: the number of
bytes that are still allowed, and one more, which shows that there are too many.
Libraries are imported when they are first used; a broker whose clients do not compress
never imports them.

The formats are those of Kafka's clients:

- gzip: RFC 1952, any number of members.
- snappy: the format of Java's snappy stream: 16 bytes of header, then blocks of an
  int32 length and raw snappy. Raw snappy, which librdkafka sends, is read, too.
- lz4: the frame format, with independent blocks.
- zstd: any number of frames, with or without a content size.

Source: KIP-57 (lz4 framing), KIP-110 (zstd), KIP-390 (levels); snappy's
``format_description.txt``.
"""

from __future__ import annotations

import struct
import sys
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from mpbroker.protocol.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    Buffer = bytes | bytearray | memoryview


class Codec(IntEnum):
    """The compression of a batch's records: the low three bits of its attributes.

    The names are those of Kafka's compression.type.
    """

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4

    @classmethod
    def from_name(cls, name: str) -> Codec:
        """Return the codec with a name: none, gzip, snappy, lz4 or zstd.

        Raises:
            ValueError: there is no codec with this name.
        """
        try:
            return _CODECS_BY_NAME[name]
        except KeyError:
            known = ", ".join(_CODECS_BY_NAME)
            raise ValueError(f"codec {name!r} is not one of {known}") from None


_CODECS_BY_NAME: Final = {codec.name.lower(): codec for codec in Codec}


class DecompressionError(ProtocolError):
    """Compressed bytes are malformed."""


class DecompressionLimitError(DecompressionError):
    """Compressed bytes would decompress to more bytes than are allowed."""


def compress(codec: int, data: Buffer, level: int | None = None) -> bytes:
    """Return ``data`` compressed by a codec.

    Args:
        codec: the codec.
        data: the bytes.
        level: with gzip -1 or 1 to 9; with lz4 1 to 17, where 9 is the fast mode, as in
            Kafka's Java code, and the others are high compression; with zstd -131072 to
            22; snappy has no levels. None: Kafka's default.

    Source: KIP-390.
    """
    return _COMPRESSORS[codec](data, level)


def decompress(
    codec: int, data: Buffer, max_bytes: int, *, strict: bool = False
) -> bytes:
    """Return ``data`` decompressed by a codec, within a limit.

    Args:
        codec: the codec.
        data: the compressed bytes.
        max_bytes: the largest number of bytes to return. The memory in use stays below
            this plus one block of the codec.
        strict: also refuse data that Kafka's Java client cannot read: lz4 frames with
            linked blocks or a dictionary, and a second lz4 frame.

    Raises:
        DecompressionLimitError: there are more than ``max_bytes`` bytes.
        DecompressionError: the data is malformed or cut off.
    """
    if codec == Codec.LZ4 and strict:
        _check_lz4_for_java(data)
    return _DECOMPRESSORS[codec](data, max_bytes)


def _limit_error(codec: str, size: int, max_bytes: int) -> DecompressionLimitError:
    return DecompressionLimitError(
        f"{size} bytes of {codec} inflate to more than the {max_bytes} bytes allowed"
    )


# -- codecs that consist of members (frames) one after the other -----------------------

# Clients write a few members at most. A million empty ones, each with a decoder of its
# own, are an attack.
_MAX_MEMBERS: Final = 1000
_FIRST_STEP: Final = 4096


def _inflate_members(
    codec: str,
    new_decoder: Callable[[], Any],
    decoder_error: type[Exception],
    data: Buffer,
    max_bytes: int,
) -> bytes:
    view = memoryview(data)
    position, step = 0, len(view)
    room = max_bytes
    parts: list[bytes] = []
    for _ in range(_MAX_MEMBERS):
        decoder = new_decoder()
        while not decoder.eof:
            if position == len(view):
                raise DecompressionError(f"{len(view)} bytes of {codec} are cut off")
            chunk = view[position : position + step]
            try:
                part = decoder.decompress(chunk, room + 1)
            except decoder_error as error:
                raise DecompressionError(f"not {codec}: {error}") from error
            if len(part) > room:
                raise _limit_error(codec, len(view), max_bytes)
            room -= len(part)
            parts.append(part)
            position += len(chunk)
            step *= 2
        # A decoder copies the bytes behind its member. The first decoder gets all
        # bytes, because there is hardly ever a second member. Later ones get a small
        # part at a time: otherwise n members would copy n * n bytes.
        position -= len(decoder.unused_data or b"")
        if position == len(view):
            return parts[0] if len(parts) == 1 else b"".join(parts)
        step = _FIRST_STEP
    raise DecompressionError(f"more than {_MAX_MEMBERS} members of {codec}")


def _gzip_compress(data: Buffer, level: int | None) -> bytes:
    import zlib

    return zlib.compress(data, -1 if level is None else level, wbits=31)


def _gzip_decompress(data: Buffer, max_bytes: int) -> bytes:
    import zlib

    return _inflate_members(
        "gzip", lambda: zlib.decompressobj(31), zlib.error, data, max_bytes
    )


def _zstd_module() -> Any:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


def _zstd_compress(data: Buffer, level: int | None) -> bytes:
    compressed: bytes = _zstd_module().compress(data, 3 if level is None else level)
    return compressed


def _zstd_decompress(data: Buffer, max_bytes: int) -> bytes:
    zstd = _zstd_module()
    return _inflate_members(
        "zstd", zstd.ZstdDecompressor, zstd.ZstdError, data, max_bytes
    )


# -- lz4 -------------------------------------------------------------------------------

_LZ4_MAGIC: Final = b"\x04\x22\x4d\x18"
_LZ4_FAST_LEVEL: Final = 9
_LZ4_LOWEST_HIGH_LEVEL: Final = 3
_LZ4_HIGHEST_LEVEL: Final = 12


class _Lz4Decoder:
    """An lz4 decoder that asks the library for a part of the output at a time.

    The library allocates as many bytes as it is asked for.
    """

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        import lz4.frame  # type: ignore[import-untyped]

        self._decoder = lz4.frame.LZ4FrameDecompressor()

    @property
    def eof(self) -> bool:
        return bool(self._decoder.eof)

    @property
    def unused_data(self) -> bytes | None:
        unused: bytes | None = self._decoder.unused_data
        return unused

    def decompress(self, data: Buffer, max_length: int) -> bytes:
        decoder = self._decoder
        ask = min(max_length, max(65536, 4 * len(data)))
        part: bytes = decoder.decompress(data, ask)
        if decoder.eof or decoder.needs_input or len(part) == max_length:
            return part
        parts, room = [part], max_length - len(part)
        while room and not (decoder.eof or decoder.needs_input):
            ask *= 2
            parts.append(decoder.decompress(b"", min(room, ask)))
            room -= len(parts[-1])
        return b"".join(parts)


def _lz4_compress(data: Buffer, level: int | None) -> bytes:
    import lz4.frame

    if level is None or level == _LZ4_FAST_LEVEL:
        lz4_level = 0
    else:
        lz4_level = min(max(level, _LZ4_LOWEST_HIGH_LEVEL), _LZ4_HIGHEST_LEVEL)
    compressed: bytes = lz4.frame.compress(
        data, lz4_level, block_linked=False, content_checksum=False, store_size=True
    )
    return compressed


def _lz4_decompress(data: Buffer, max_bytes: int) -> bytes:
    return _inflate_members("lz4", _Lz4Decoder, RuntimeError, data, max_bytes)


def _check_lz4_for_java(data: Buffer) -> None:
    """Refuse lz4 frames that liblz4 can read, but Kafka's Java client cannot.

    The Java client needs version 1, independent blocks, no dictionary and a reserved
    bit of 0. It reads no bytes after the end mark of the first frame.

    Source: Kafka's Lz4BlockInputStream.

    Raises:
        DecompressionError: the data is not a single frame that the client can read.
    """
    if len(data) < 11 or bytes(data[:4]) != _LZ4_MAGIC:
        raise DecompressionError(f"{len(data)} bytes are not an lz4 frame")
    flags = data[4]
    if flags >> 6 != 1 or not flags & 0x20 or flags & 0x03:
        raise DecompressionError(
            f"lz4 frame flags {flags:#04x}: Kafka needs version 1, independent blocks "
            "and no dictionary; set the producer's lz4 to independent blocks"
        )
    has_block_checksum, has_content_size = flags & 0x10, flags & 0x08
    position = 15 if has_content_size else 7
    while position + 4 <= len(data):
        word = int.from_bytes(data[position : position + 4], "little")
        position += 4
        if not word:
            break
        position += (word & 0x7FFFFFFF) + (4 if has_block_checksum else 0)
    position += 4 if flags & 0x04 else 0
    if position != len(data):
        raise DecompressionError(
            f"lz4 frame of {position} bytes in a payload of {len(data)}: Kafka's Java "
            "client reads exactly one frame"
        )


# -- snappy ----------------------------------------------------------------------------

_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER: Final = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK_BYTES: Final = 32 * 1024  # snappy-java's default
_INT32: Final = struct.Struct(">i")
# Three bytes of a copy element give 64 bytes at most, so a larger stated size is wrong.
_SNAPPY_MAX_RATIO: Final = 22


def _snappy_compress(data: Buffer, level: int | None) -> bytes:
    from cramjam import snappy

    view = memoryview(data)
    parts = [_XERIAL_HEADER]
    for start in range(0, len(view), _XERIAL_BLOCK_BYTES):
        block = bytes(snappy.compress_raw(view[start : start + _XERIAL_BLOCK_BYTES]))
        parts.append(_INT32.pack(len(block)))
        parts.append(block)
    return b"".join(parts)


def _snappy_decompress(data: Buffer, max_bytes: int) -> bytes:
    view = memoryview(data)
    if bytes(view[:8]) != _XERIAL_MAGIC:
        return _inflate_raw_snappy(view, max_bytes, len(view), max_bytes)
    parts: list[bytes] = []
    position, room = len(_XERIAL_HEADER), max_bytes
    while position < len(view):
        if len(view) - position < 4:
            raise DecompressionError(f"{len(view)} bytes of snappy are cut off")
        (size,) = _INT32.unpack_from(view, position)
        if size < 0 and bytes(view[position : position + 8]) == _XERIAL_MAGIC:
            position += len(_XERIAL_HEADER)  # another stream follows the first
            continue
        position += 4
        if not 0 < size <= len(view) - position:
            raise DecompressionError(
                f"snappy block of {size} bytes with {len(view) - position} left"
            )
        block = view[position : position + size]
        part = _inflate_raw_snappy(block, room, len(view), max_bytes)
        room -= len(part)
        position += size
        parts.append(part)
    return b"".join(parts)


def _inflate_raw_snappy(
    block: memoryview, room: int, total: int, max_bytes: int
) -> bytes:
    import cramjam

    claimed = shift = 0
    for byte in block[:5]:
        claimed |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    else:
        raise DecompressionError("not snappy: no length at the start")
    if claimed > room:
        raise _limit_error("snappy", total, max_bytes)
    if claimed > _SNAPPY_MAX_RATIO * len(block):
        raise DecompressionError(
            f"not snappy: {len(block)} bytes cannot inflate to {claimed}"
        )
    try:
        return bytes(cramjam.snappy.decompress_raw(block))
    except cramjam.DecompressionError as error:
        raise DecompressionError(f"not snappy: {error}") from error


# -- none ------------------------------------------------------------------------------


def _plain_compress(data: Buffer, level: int | None) -> bytes:
    return bytes(data)


def _plain_decompress(data: Buffer, max_bytes: int) -> bytes:
    if len(data) > max_bytes:
        raise _limit_error("plain data", len(data), max_bytes)
    return bytes(data)


_COMPRESSORS: Final[tuple[Callable[[Buffer, int | None], bytes], ...]] = (
    _plain_compress,
    _gzip_compress,
    _snappy_compress,
    _lz4_compress,
    _zstd_compress,
)
_DECOMPRESSORS: Final[tuple[Callable[[Buffer, int], bytes], ...]] = (
    _plain_decompress,
    _gzip_decompress,
    _snappy_decompress,
    _lz4_decompress,
    _zstd_decompress,
)
