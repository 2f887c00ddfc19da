"""Regular expressions over topic names, in time linear in the name.

A pattern is any client's, and the coordinator must never be held up by one; Python's
own engine backtracks, for hours where the client wishes it. So this is the classical
simulation: the set of states a non-deterministic automaton may be in, character by
character. What RE2 has and topic names need is here: literals, classes, groups,
alternatives, repetition. What it lacks (back references, looking around) is refused
as it is there.

Source: Thompson, "Regular Expression Search Algorithm" (1968); KIP-848 and RE2/J's
syntax for what clients may write. A name matches if all of it does.
"""

from __future__ import annotations

from typing import Final

from mpbroker.base.errors import MpbrokerError

_MAX_PATTERN: Final = 4096
# A name has at most 249 characters: 30 ms for the worst name of the worst pattern.
_MAX_STATES: Final = 500
_MAX_REPEAT: Final = 1000  # as RE2
_MAX_REMEMBERED: Final = 10_000
_MAX_DEPTH: Final = 100

_DIGITS: Final = frozenset("0123456789")
_LETTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_WORD: Final = _DIGITS | _LETTERS | {"_"}
_SPACE: Final = frozenset(" \t\n\r\f\v")
_CLASSES: Final = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_NAMED_CLASSES: Final = {
    "alnum": _DIGITS | _LETTERS,
    "alpha": _LETTERS,
    "digit": _DIGITS,
    "lower": frozenset(c for c in _LETTERS if c.islower()),
    "upper": frozenset(c for c in _LETTERS if c.isupper()),
    "word": _WORD,
    "space": _SPACE,
    "punct": frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"),
}
_CONTROLS: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}


class InvalidRegexError(MpbrokerError):
    """A pattern that cannot be understood; says where and why."""


class _Set:
    """A character class, or its complement."""

    __slots__ = ("_characters", "_negated", "_ranges")

    def __init__(
        self,
        characters: frozenset[str],
        ranges: tuple[tuple[str, str], ...] = (),
        *,
        negated: bool = False,
    ) -> None:
        self._characters = characters
        self._ranges = ranges
        self._negated = negated

    def has(self, character: str) -> bool:
        inside = character in self._characters or any(
            low <= character <= high for low, high in self._ranges
        )
        return inside is not self._negated


_ANY: Final = _Set(frozenset("\n"), negated=True)
_START, _END = "^", "$"

# A node of the syntax tree: ("set", _Set), ("cat", nodes), ("alt", nodes),
# ("repeat", node, least, most or None), ("assert", "^" or "$").
_Node = tuple[object, ...]
# Repeated a thousand times, a thousand times, it makes no states but takes that long.
_NOTHING: Final[_Node] = ("cat", [])


class TopicRegex:
    """A compiled pattern.

    Raises:
        InvalidRegexError: the pattern is none.
    """

    def __init__(self, pattern: str) -> None:
        if len(pattern) > _MAX_PATTERN:
            raise InvalidRegexError(
                f"a pattern of {len(pattern)} characters; at most {_MAX_PATTERN}"
            )
        # Of each state: what it takes (None: nothing), and where it leads.
        self._takes: list[_Set | str | None] = []
        self._next: list[list[int]] = []
        self._steps: dict[tuple[frozenset[int], str, bool], frozenset[int]] = {}
        node = _Parser(pattern).parse()
        self._accept = self._state(None)
        self._start = self._compile(node, self._accept)

    def _state(self, takes: _Set | str | None, *following: int) -> int:
        if len(self._takes) >= _MAX_STATES:
            raise InvalidRegexError(
                f"the pattern's repetitions need more than {_MAX_STATES} states"
            )
        self._takes.append(takes)
        self._next.append(list(following))
        return len(self._takes) - 1

    def _compile(self, node: _Node, then: int) -> int:
        """Build the states of a node; return the first of them."""
        kind, *rest = node
        if kind in ("set", "assert"):
            return self._state(rest[0], then)  # type: ignore[arg-type]
        if kind == "cat":
            for child in reversed(rest[0]):  # type: ignore[call-overload]
                then = self._compile(child, then)
            return then
        if kind == "alt":
            starts = [self._compile(child, then) for child in rest[0]]  # type: ignore[attr-defined]
            return self._state(None, *starts)
        child, least, most = rest
        return self._repeat(child, least, most, then)  # type: ignore[arg-type]

    def _repeat(self, child: _Node, least: int, most: int | None, then: int) -> int:
        if most is None:
            loop = self._state(None, then)
            self._next[loop].insert(0, self._compile(child, loop))
            then = loop
        else:
            end = then
            for _ in range(most - least):
                then = self._state(None, self._compile(child, then), end)
        for _ in range(least):
            then = self._compile(child, then)
        return then

    def matches(self, name: str) -> bool:
        """Say whether the whole of a name matches."""
        end = len(name) - 1
        states = self._closure({self._start}, at_start=True, at_end=end < 0)
        for position, character in enumerate(name):
            states = self._step(states, character, at_end=position == end)
            if not states:
                return False
        return self._accept in states

    def _step(
        self, states: frozenset[int], character: str, *, at_end: bool
    ) -> frozenset[int]:
        """Where a character leads. Names are much alike: most steps are known."""
        key = states, character, at_end
        known = self._steps.get(key)
        if known is not None:
            return known
        following = {
            target
            for state in states
            if isinstance(takes := self._takes[state], _Set) and takes.has(character)
            for target in self._next[state]
        }
        found = self._closure(following, at_start=False, at_end=at_end)
        if len(self._steps) < _MAX_REMEMBERED:
            self._steps[key] = found
        return found

    def _closure(
        self, states: set[int], *, at_start: bool, at_end: bool
    ) -> frozenset[int]:
        """All states that can be reached without taking a character."""
        todo, found = list(states), set(states)
        while todo:
            state = todo.pop()
            takes = self._takes[state]
            if isinstance(takes, _Set):
                continue
            if (takes == _START and not at_start) or (takes == _END and not at_end):
                continue
            for target in self._next[state]:
                if target not in found:
                    found.add(target)
                    todo.append(target)
        return frozenset(found)


class _Parser:
    """Recursive descent over a pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def parse(self) -> _Node:
        node = self._alternatives()
        if self._at < len(self._pattern):
            self._refuse("unmatched )")
        return node

    def _refuse(self, why: str) -> None:
        raise InvalidRegexError(f"{why} at {self._at} of {self._pattern[:200]!r}")

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self, why: str = "the pattern ends too early") -> str:
        character = self._peek()
        if not character:
            self._refuse(why)
        self._at += 1
        return character

    def _skip(self, text: str) -> bool:
        if self._pattern.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _alternatives(self) -> _Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self._refuse(f"groups more than {_MAX_DEPTH} deep")
        branches = [self._sequence()]
        while self._skip("|"):
            branches.append(self._sequence())
        self._depth -= 1
        return branches[0] if len(branches) == 1 else ("alt", branches)

    def _sequence(self) -> _Node:
        nodes: list[_Node] = []
        while self._peek() and self._peek() not in "|)":
            node = self._repeated()
            if node != _NOTHING:
                nodes.append(node)
        return "cat", nodes

    def _repeated(self) -> _Node:
        node = self._atom()
        counts = self._repetition()
        if counts is None:
            return node
        if self._repetition() is not None:
            self._refuse("a repetition of a repetition")
        if node == _NOTHING or counts == (0, 0):
            return _NOTHING
        return "repeat", node, *counts

    def _repetition(self) -> tuple[int, int | None] | None:
        """Read how often something may come, if that is said here."""
        counts: tuple[int, int | None] | None = None
        if self._skip("*"):
            counts = 0, None
        elif self._skip("+"):
            counts = 1, None
        elif self._skip("?"):
            counts = 0, 1
        elif self._peek() == "{":
            counts = self._counts()
        if counts is not None:
            self._skip("?")  # lazy or greedy: the same names match
        return counts

    def _counts(self) -> tuple[int, int | None] | None:
        """Read {n}, {n,} or {n,m}; anything else is a literal brace."""
        end = self._pattern.find("}", self._at)
        inside = self._pattern[self._at + 1 : end] if end > 0 else ""
        low, comma, high = inside.partition(",")
        if not (low.isascii() and low.isdigit()) or not (
            high == "" or (high.isascii() and high.isdigit())
        ):
            return None
        if len(low) > 4 or len(high) > 4:
            self._refuse(f"more than {_MAX_REPEAT} repetitions")
        least = int(low)
        most = int(high) if high else None if comma else least
        if least > _MAX_REPEAT or (most is not None and not least <= most <= 1000):
            self._refuse(f"bad repetition {{{inside}}}; at most {_MAX_REPEAT}")
        self._at = end + 1
        return least, most

    def _atom(self) -> _Node:
        character = self._take()
        if character == "(":
            return self._group()
        if character == "[":
            return "set", self._bracket()
        if character == ".":
            return "set", _ANY
        if character in "^$":
            return "assert", character
        if character in "*+?":
            self._at -= 1
            self._refuse(f"nothing to repeat before {character}")
        if character == "\\":
            if self._peek() in ("A", "z"):
                return "assert", _START if self._take() == "A" else _END
            return "set", self._escape()
        return "set", _Set(frozenset(character))

    def _group(self) -> _Node:
        if self._skip("?") and not self._skip(":"):
            if not (self._skip("P<") or self._skip("<")) or self._peek() in "=!":
                self._refuse("looking around and flags are not served")
            while self._take("a group's name without >") != ">":
                pass
        node = self._alternatives()
        if not self._skip(")"):
            self._refuse("missing )")
        return node

    def _escape(self) -> _Set:
        character = self._take("a pattern ends in \\")
        if character.lower() in _CLASSES:
            members = _CLASSES[character.lower()]
            return _Set(members, negated=character.isupper())
        return _Set(frozenset(self._escaped(character)))

    def _escaped(self, character: str) -> str:
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character in _LETTERS or character in _DIGITS:
            self._refuse(f"\\{character} is not served")
        return character

    def _bracket(self) -> _Set:
        negated = self._skip("^")
        members: set[str] = set()
        ranges: list[tuple[str, str]] = []
        first = True
        while first or self._peek() != "]":
            first = False
            if self._skip("[:"):
                members |= self._named_class()
                continue
            character = self._take("missing ]")
            if character == "\\":
                character = self._take("missing ]")
                if character in _CLASSES:
                    members |= _CLASSES[character]
                    continue
                character = self._escaped(character)
            after = self._pattern[self._at + 1 : self._at + 2]
            if self._peek() == "-" and after not in ("]", ""):
                self._at += 1
                last = self._take("missing ]")
                if last == "\\":
                    last = self._escaped(self._take("missing ]"))
                if last < character:
                    self._refuse(f"bad range {character}-{last}")
                ranges.append((character, last))
            else:
                members.add(character)
        self._at += 1
        return _Set(frozenset(members), tuple(ranges), negated=negated)

    def _named_class(self) -> frozenset[str]:
        end = self._pattern.find(":]", self._at)
        name = self._pattern[self._at : end] if end > 0 else ""
        if name not in _NAMED_CLASSES:
            self._refuse("unknown [:class:]")
        self._at = end + 2
        return _NAMED_CLASSES[name]
