r"""Match names against clients' patterns by RE2, in time linear in the name.

Any client may send a pattern, and one coordinator serves all groups: no pattern may
take memory or time without a bound. Python's own engine backtracks, for hours if a
client wishes it. Kafka uses RE2/J, the Java port of RE2.

RE2's time is linear in the name, but the pattern sets the factor. Four limits bound
the factor; they are far above the needs of sensible patterns. Measured with names of
249 characters:

    limit                 worst pattern found without this limit
    4,096 bytes           each of the following grows with the length
    max_mem 256 KiB       200,000 instructions: 12 MB
    32 Unicode classes    (?:\pL\pL\pL...){0}: 44 MB, 150 ms to compile
    16 named groups       (?:(?<n>a*)(?<n>a*)...){1,5}x: 50 MB, 1.2 s a name

    with all four         worst found    (?i)orders.*
    to compile            40 ms          20 us
    to match a name       80 ms          2 us
    memory at its peak    3 MB           0.1 MB

No compiled pattern outlives its request, so their number needs no limit: to compile
one again costs as much as to match ten names.

RE2 and RE2/J 1.8 were compared on 560,000 random patterns and on 250 chosen ones.
These are all the kinds of patterns that only one of them accepts:

    pattern                                         RE2         RE2/J
    (a{500}){500}: more than 1,000 copies in all    refused     accepted
    \é: an escaped letter that is not ASCII         refused     accepted
    \C: one byte                                    accepted    refused
    (?<n>a)(?<n>b): one name for two groups         accepted    refused
    (?<é>a): a group's name that is not ASCII       accepted    refused
    {*: a literal brace, repeated                   accepted    refused
    a{12345678901}: literal to RE2                  accepted    refused

They match differently only where their tables of Unicode differ; and (?i)\p{Ll}
matches A in RE2 alone.

Source: RE2's doc/syntax.txt and re2.h; KIP-848, KIP-1152 and Kafka's
GroupMetadataManager and TransactionStateManager, where the whole name must match.
"""

from __future__ import annotations

from typing import Any, Final

from mpbroker.base.errors import MpbrokerError

_MAX_PATTERN_BYTES: Final = 4096
_MAX_UNICODE_CLASSES: Final = 32
_MAX_NAMED_GROUPS: Final = 16
_MAX_MEMORY_BYTES: Final = 256 * 1024
# Some of RE2's messages quote the whole pattern.
_MAX_REASON_CHARACTERS: Final = 200


class InvalidRegexError(MpbrokerError):
    """RE2 or one of the limits refuses the pattern; the message says why."""


class LinearRegex:
    """A pattern that RE2 has compiled.

    Raises:
        InvalidRegexError: the pattern has a wrong syntax, or exceeds a limit.
    """

    def __init__(self, pattern: str) -> None:
        self._regex = _compile(pattern.encode())

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches the whole name, as Kafka's matches()."""
        # RE2 reads UTF-8: a "." is one character of bytes, too. Given a str, its Python
        # wrapper would compute offsets in characters, which doubles the time.
        return self._regex.fullmatch(name.encode()) is not None


def _compile(pattern: bytes) -> Any:
    if len(pattern) > _MAX_PATTERN_BYTES:
        raise InvalidRegexError(
            f"a pattern of {len(pattern)} bytes; at most {_MAX_PATTERN_BYTES}"
        )
    # Counted before RE2 parses them, which takes 30 KB and 0.1 ms each. This counts the
    # p of an escaped backslash (\\p) too; no sensible pattern has 32 of either.
    classes = pattern.count(rb"\p") + pattern.count(rb"\P")
    if classes > _MAX_UNICODE_CLASSES:
        raise InvalidRegexError(
            f"{classes} Unicode classes; at most {_MAX_UNICODE_CLASSES}"
        )
    try:
        # Imported with the first pattern: 6 ms and 3 MB that most brokers never need.
        import re2
    except ImportError as error:
        # mpbroker may be installed without it where there is no wheel (musl). Groups
        # that subscribe by name work there; others are told why they do not.
        raise InvalidRegexError(f"google-re2 is not installed here: {error}") from error
    options = re2.Options()
    options.max_mem = _MAX_MEMORY_BYTES
    options.log_errors = False  # to stderr, for any client's mistake
    # No caller asks what a group matched. RE2 records it for named groups all the same.
    options.never_capture = True
    try:
        regex = re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace")
        raise InvalidRegexError(reason[:_MAX_REASON_CHARACTERS]) from None
    finally:
        re2.purge()  # its wrapper keeps the last 128 compiled patterns
    if regex.groups > _MAX_NAMED_GROUPS:
        raise InvalidRegexError(
            f"{regex.groups} named groups; at most {_MAX_NAMED_GROUPS}"
        )
    return regex
