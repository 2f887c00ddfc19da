"""Translate Java's regular expressions to Python's, for the names of topics.

Spark's connector reads `subscribePattern` as Java does. The two languages differ in
classes of characters most of all (``\\p{Lower}``, ``[a-z&&[^aeiou]]``, ``\\h``), and a
topic's name has 65 different characters only. So each class becomes the list of those
characters that it contains, and the rest is rewritten piece by piece. A construct that
Python lacks is refused: no pattern has another meaning here than in Java.

Source: the documentation of java.util.regex.Pattern, Java 17, and
SubscribePatternStrategy of Spark's connector.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from string import ascii_letters, ascii_lowercase, ascii_uppercase, digits, hexdigits
from typing import Final, Never

Characters = frozenset[str]

_ALL: Final[Characters] = frozenset(ascii_letters + digits + "._-")
_NONE: Final[Characters] = frozenset()
_LOWER: Final = frozenset(ascii_lowercase)
_UPPER: Final = frozenset(ascii_uppercase)
_LETTERS: Final = frozenset(ascii_letters)
_DIGITS: Final = frozenset(digits)
_ALNUM: Final = _LETTERS | _DIGITS
_WORD: Final = _ALNUM | {"_"}
_PUNCT: Final = _ALL - _ALNUM

_ESCAPED_CLASSES: Final = {
    "d": _DIGITS,
    "w": _WORD,
    "s": _NONE,
    "h": _NONE,
    "v": _NONE,
}
_ESCAPED_CONTROLS: Final = {
    "t": "\t",
    "n": "\n",
    "r": "\r",
    "f": "\f",
    "a": "\a",
    "e": "\x1b",
}
_ANCHORS: Final = {
    "A": r"\A",
    "G": r"\A",
    "Z": r"\Z",
    "z": r"\Z",
    "b": r"\b",
    "B": r"\B",
}

_PROPERTIES: Final = {
    "Lower": _LOWER,
    "Upper": _UPPER,
    "ASCII": _ALL,
    "Alpha": _LETTERS,
    "Digit": _DIGITS,
    "Alnum": _ALNUM,
    "Punct": _PUNCT,
    "Graph": _ALL,
    "Print": _ALL,
    "Blank": _NONE,
    "Cntrl": _NONE,
    "XDigit": frozenset(hexdigits),
    "Space": _NONE,
    "javaLowerCase": _LOWER,
    "javaUpperCase": _UPPER,
    "javaAlphabetic": _LETTERS,
    "javaLetter": _LETTERS,
    "javaDigit": _DIGITS,
    "javaLetterOrDigit": _ALNUM,
    "javaDefined": _ALL,
    "javaJavaIdentifierStart": _LETTERS | {"_"},
    "javaJavaIdentifierPart": _WORD,
    "javaUnicodeIdentifierStart": _LETTERS,
    "javaUnicodeIdentifierPart": _WORD,
    "javaTitleCase": _NONE,
    "javaIdeographic": _NONE,
    "javaIdentifierIgnorable": _NONE,
    "javaSpaceChar": _NONE,
    "javaWhitespace": _NONE,
    "javaISOControl": _NONE,
    "javaMirrored": _NONE,
    "all": _ALL,
    "L1": _ALL,
    "LC": _LETTERS,
    "LD": _ALNUM,
}
_CATEGORIES: Final = frozenset(
    {"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Me", "Mc", "Nd", "Nl", "No", "Zs", "Zl", "Zp"}
    | {"Cc", "Cf", "Co", "Cs", "Cn", "Pd", "Ps", "Pe", "Pc", "Po", "Pi", "Pf"}
    | {"Sm", "Sc", "Sk", "So", "L", "M", "N", "Z", "C", "P", "S"}
)
# The names that may follow "Is" in \p{Is...}, in capitals.
_UNICODE_PROPERTIES: Final = {
    "ALPHABETIC": _LETTERS,
    "LETTER": _LETTERS,
    "LOWERCASE": _LOWER,
    "UPPERCASE": _UPPER,
    "PUNCTUATION": _PUNCT,
    "DIGIT": _DIGITS,
    "ALNUM": _ALNUM,
    "HEX_DIGIT": frozenset(hexdigits),
    "HEXDIGIT": frozenset(hexdigits),
    "WORD": _WORD,
    "GRAPH": _ALL,
    "PRINT": _ALL,
    "ASSIGNED": _ALL,
    "TITLECASE": _NONE,
    "IDEOGRAPHIC": _NONE,
    "WHITE_SPACE": _NONE,
    "WHITESPACE": _NONE,
    "CONTROL": _NONE,
    "BLANK": _NONE,
}
_SCRIPTS: Final = {
    "LATIN": _LETTERS,
    "LATN": _LETTERS,
    "COMMON": _ALL - _LETTERS,
    "ZYYY": _ALL - _LETTERS,
}
_BLOCKS: Final = frozenset({"BASICLATIN", "BASIC_LATIN", "BASIC LATIN"})

_QUOTED: Final = re.compile(r"\\(?:Q(?P<quoted>.*?)(?:\\E|\Z)|.)", re.DOTALL)
_COUNTS: Final = re.compile(r"\{(\d{1,9})(?:(,)(\d{1,9})?)?\}", re.ASCII)
_FLAGS: Final = re.compile(r"\(\?([a-zA-Z]*)(?:-([a-zA-Z]*))?([:)])")
_NAMED: Final = re.compile(r"\(\?<([a-zA-Z][a-zA-Z0-9]*)>")
_BRACED_NAME: Final = re.compile(r"\{([^}]*)\}")
_REFERENCE: Final = re.compile(r"<([a-zA-Z][a-zA-Z0-9]*)>")
_NUMBERS: Final = {
    "x": re.compile(r"([0-9a-fA-F]{2})|\{([0-9a-fA-F]{1,6})\}"),
    "u": re.compile(r"([0-9a-fA-F]{4})"),
    "0": re.compile(r"([0-3][0-7]{2}|[0-7]{1,2})"),
}
# Without effect: names have no line ends.
_HARMLESS_FLAGS: Final = frozenset("dms")


class TopicPatternError(ValueError):
    """A pattern is not a regular expression of Java, or Python has no equivalent."""


def compile_topic_pattern(pattern: str) -> re.Pattern[str]:
    """Return a Python pattern for the topic names that a Java pattern matches.

    Use its `search`: Spark's connector, too, takes a name that has a match anywhere. A
    pattern for whole names begins with ``^`` and ends with ``$``.

    Raises:
        TopicPatternError: the pattern is wrong in Java, too, or Python has no
            equivalent.
    """
    try:
        return re.compile(_Translator(pattern).translate())
    except (re.error, OverflowError) as error:
        raise TopicPatternError(f"Python cannot do this: {error}") from None
    except RecursionError:
        raise TopicPatternError("its groups are nested too deeply") from None


class _Translator:
    """Translates a Java pattern to Python's syntax, in one pass from left to right."""

    def __init__(self, pattern: str) -> None:
        self._text = _QUOTED.sub(_unquote, pattern)
        self._at = 0
        self._ignore_case = False
        self._unicode_case = False
        self._opened = 0
        self._closed: set[int] = set()
        self._names: dict[str, int] = {}

    def translate(self) -> str:
        found = self._alternatives()
        if self._at < len(self._text):
            self._refuse("there is a ) without a (")
        return found

    # -- reading -----------------------------------------------------------------------

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        found = self._peek()
        self._at += 1
        return found

    def _take(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _match(self, wanted: re.Pattern[str]) -> re.Match[str] | None:
        found = wanted.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _refuse(self, why: str) -> Never:
        raise TopicPatternError(f"{why} (character {self._at + 1})")

    # -- groups and quantifiers --------------------------------------------------------

    def _alternatives(self) -> str:
        found = []
        while self._at < len(self._text) and self._peek() != ")":
            if self._take("|"):
                found.append("|")
                continue
            piece = self._piece()
            found.append(piece + self._quantifier(piece))
        return "".join(found)

    def _piece(self) -> str:
        """Translate the next piece of the pattern; a quantifier may follow it."""
        character = self._peek()
        if character == "(":
            return self._group()
        if character == "[":
            self._at += 1
            return _listed(self._class())
        if character in ("?", "*", "+", "{"):
            self._refuse(f"there is nothing that {character} could repeat")
        self._at += 1
        if character == "\\":
            return self._escape()
        if character == ".":
            return _listed(_ALL)
        if character == "^":
            return r"(?:\A)"
        if character == "$":
            return r"(?:\Z)"
        return _listed(self._single(character))

    def _quantifier(self, piece: str) -> str:
        character = self._peek()
        if not piece or character not in ("?", "*", "+", "{"):
            return ""
        if character == "{":
            counts = self._match(_COUNTS)
            if counts is None:
                self._refuse("behind { there must be N}, N,} or N,M}")
            if counts[3] and int(counts[3]) < int(counts[1]):
                self._refuse(f"{counts[0]} ends below its beginning")
            found = counts[0]
        else:
            found = self._next()
        for suffix in ("?", "+"):
            if self._take(suffix):
                return found + suffix
        return found

    def _group(self) -> str:
        """Translate a group to Python's syntax; "" for an inline flag such as (?i)."""
        before = self._ignore_case, self._unicode_case
        number = None
        if flags := self._match(_FLAGS):
            self._set_flags(flags[1], True)
            self._set_flags(flags[2] or "", False)
            if flags[3] == ")":
                return ""
            begin = "(?:"
        elif name := self._match(_NAMED):
            number = self._open()
            if name[1] in self._names:
                self._refuse(f"there are two groups {name[1]}")
            self._names[name[1]] = number
            begin = "("
        else:
            kinds = ("(?=", "(?!", "(?<=", "(?<!", "(?>")
            begin = next((each for each in kinds if self._take(each)), "")
            if not begin:
                if self._text.startswith("(?", self._at):
                    self._refuse("there is no such kind of group")
                self._at += 1
                number = self._open()
                begin = "("
        inside = self._alternatives()
        if not self._take(")"):
            self._refuse("a ( is not closed")
        self._ignore_case, self._unicode_case = before
        if number is not None:
            self._closed.add(number)
        found = f"{begin}{inside})"
        # Python allows a quantifier after a group, but not after a lookaround.
        return f"(?:{found})" if begin.startswith(("(?=", "(?!", "(?<")) else found

    def _open(self) -> int:
        self._opened += 1
        return self._opened

    def _set_flags(self, flags: str, value: bool) -> None:
        for flag in flags:
            if flag == "i":
                self._ignore_case = value
            elif flag == "u" or flag == "U":
                self._unicode_case = value
            elif flag not in _HARMLESS_FLAGS:
                self._refuse(f"the flag {flag} is not supported")

    # -- escapes -----------------------------------------------------------------------

    def _escape(self) -> str:
        """Translate the escape after a backslash that is outside a character class."""
        character = self._peek()
        if character in _ANCHORS:
            self._at += 1
            if character == "b" and self._peek() == "{":
                self._refuse("\\b{g} is not supported")
            return f"(?:{_ANCHORS[character]})"
        if character == "R":
            self._at += 1
            return _listed(_NONE)
        if character == "X":
            self._at += 1
            return _listed(_ALL)
        if character == "k":
            self._at += 1
            return self._named_reference()
        if character in digits and character not in ("", "0"):
            return self._numbered_reference()
        return _listed(self._escaped_characters()[0])

    def _named_reference(self) -> str:
        name = self._match(_REFERENCE)
        if name is None or name[1] not in self._names:
            self._refuse("\\k must name a group before it, as \\k<name>")
        return self._reference(self._names[name[1]])

    def _numbered_reference(self) -> str:
        number = int(self._next())
        while (digit := self._peek()) and digit in digits:
            if number * 10 + int(digit) > self._opened:
                break
            number = number * 10 + int(digit)
            self._at += 1
        return self._reference(number)

    def _reference(self, number: int) -> str:
        if number not in self._closed:
            self._refuse(f"\\{number} must stand behind the end of group {number}")
        return f"(?{'i' if self._ignore_case else ''}:\\{number})"

    def _escaped_characters(self) -> tuple[Characters, str]:
        """Read an escape; return the characters that match it, and the one it spells.

        The second is "" for an escape that stands for a class, such as \\d.
        """
        kind = self._next()
        if kind in ("p", "P"):
            return self._property(kind == "P"), ""
        if kind and kind in _ESCAPED_CLASSES:
            return _ESCAPED_CLASSES[kind], ""
        if kind and kind.lower() in _ESCAPED_CLASSES:
            return _ALL - _ESCAPED_CLASSES[kind.lower()], ""
        single = self._escaped_single(kind)
        return self._single(single), single

    def _escaped_single(self, kind: str) -> str:
        if kind in _ESCAPED_CONTROLS:
            return _ESCAPED_CONTROLS[kind]
        if kind in _NUMBERS:
            number = self._match(_NUMBERS[kind])
            if number is None:
                self._refuse(f"behind \\{kind} there must be a number")
            code = int(number[number.lastindex or 1], 8 if kind == "0" else 16)
            if code > 0x10FFFF:
                self._refuse(f"there is no character {number[0]}")
            return chr(code)
        if kind == "c" and self._peek():
            return chr(ord(self._next()) ^ 64)
        if kind == "N":
            name = self._match(_BRACED_NAME)
            try:
                return unicodedata.lookup(name[1] if name else "")
            except KeyError:
                self._refuse("\\N must name a character, as \\N{FULL STOP}")
        if not kind:
            self._refuse("there is nothing behind the last \\")
        if kind in ascii_letters or kind in digits:
            self._refuse(f"there is no \\{kind} here")
        return kind

    def _property(self, negated: bool) -> Characters:
        name = self._match(_BRACED_NAME)
        text = name[1] if name else self._next()
        found = self._cased(_property_characters(text, self._refuse))
        return _ALL - found if negated else found

    # -- classes -----------------------------------------------------------------------

    def _class(self) -> Characters:
        """Read a character class after its [, up to its ]; return its characters."""
        negated = self._take("^")
        found = self._class_body()
        if not self._take("]"):
            self._refuse("a [ is not closed")
        return _ALL - found if negated else found

    def _class_body(self) -> Characters:
        """Read a character class up to its closing ], and return its characters.

        The ] itself is not consumed.
        """
        found: Characters = _NONE
        is_empty = True
        while character := self._peek():
            if character == "]" and not is_empty:
                return found
            if self._take("&&"):
                right = self._intersected()
                found = right if is_empty else found & right
            elif character == "[":
                self._at += 1
                found |= self._class()
            else:
                found |= self._range()
            is_empty = False
        self._refuse("a [ is not closed")

    def _intersected(self) -> Characters:
        """Read the part of a character class after &&, and return its characters."""
        found: Characters = _NONE
        is_empty = True
        while self._peek() not in ("", "]", "&"):
            if self._take("["):
                found |= self._class()
            else:
                found |= self._class_body()
            is_empty = False
        if is_empty:
            self._refuse("there is nothing behind &&")
        return found

    def _range(self) -> Characters:
        """Read a character, an escape or a range in a class; return its characters."""
        first = self._next()
        if first == "\\":
            found, first = self._escaped_characters()
            if not first:
                return found
        else:
            found = self._single(first)
        behind = self._text[self._at + 1 : self._at + 2]
        if self._peek() != "-" or behind in ("", "[", "]"):
            return found
        self._at += 1
        last = self._next()
        if last == "\\":
            last = self._escaped_characters()[1]
        if last < first:
            self._refuse("a range ends below its beginning")
        return self._cased(frozenset(each for each in _ALL if first <= each <= last))

    # -- case --------------------------------------------------------------------------

    def _single(self, character: str) -> Characters:
        if self._ignore_case and (self._unicode_case or character.isascii()):
            upper = character.upper()
            lower = (upper if len(upper) == 1 else character).lower()
            return frozenset(each for each in _ALL if each.lower() == lower)
        return _ALL & {character}

    def _cased(self, characters: Characters) -> Characters:
        if not self._ignore_case:
            return characters
        return characters | {each.swapcase() for each in characters}


def _unquote(found: re.Match[str]) -> str:
    quoted = found["quoted"]
    if quoted is None:
        return found[0]
    return "".join(
        each if each.isalnum() or not each.isascii() else f"\\{each}" for each in quoted
    )


def _listed(characters: Characters) -> str:
    if characters == _ALL:
        return "."
    if not characters:
        return r"[^\s\S]"
    return f"[{''.join(map(re.escape, sorted(characters)))}]"


def _property_characters(name: str, refuse: Callable[[str], Never]) -> Characters:
    """Return the characters of ``\\p{name}``."""
    key, _, value = name.partition("=")
    found = None
    if value:
        key = key.lower()
        if key in ("sc", "script"):
            found = _SCRIPTS.get(value.upper())
        elif key in ("blk", "block"):
            found = _ALL if value.upper() in _BLOCKS else None
        elif key in ("gc", "general_category"):
            found = _category(value)
    elif name.startswith("In"):
        found = _ALL if name[2:].upper() in _BLOCKS else None
    elif name.startswith("Is"):
        inside = name[2:]
        found = _UNICODE_PROPERTIES.get(inside.upper())
        if found is None:
            found = _category(inside)
        if found is None:
            found = _SCRIPTS.get(inside.upper())
    else:
        found = _category(name)
    if found is None:
        refuse(f"\\p{{{name}}} is unknown, or no topic's name has such a character")
    return found


def _category(name: str) -> Characters | None:
    if name in _PROPERTIES:
        return _PROPERTIES[name]
    if name in _CATEGORIES:
        return frozenset(
            each for each in _ALL if unicodedata.category(each).startswith(name)
        )
    return None
