"""Our NamedTuple makes what typing's makes."""

from __future__ import annotations

import pickle
import typing

import pytest

from mpbroker.base.named_tuple import NamedTuple


class Ours(NamedTuple):
    """A row."""

    key: int
    text: str = "none"
    rest: tuple[Unknown, ...] = ()  # noqa: F821  # an annotation is never evaluated

    @property
    def doubled(self) -> int:
        return self.key * 2

    @classmethod
    def of_text(cls, text: str) -> Ours:
        return cls(len(text), text)


class Theirs(typing.NamedTuple):
    """A row."""

    key: int
    text: str = "none"
    rest: tuple[int, ...] = ()


def test_it_has_the_fields_defaults_and_text_of_typings_named_tuple():
    assert Ours._fields == Theirs._fields
    assert Ours._field_defaults == Theirs._field_defaults
    assert Ours.__doc__ == Theirs.__doc__
    assert Ours.__annotations__.keys() == Theirs.__annotations__.keys()
    assert repr(Ours(1)) == repr(Theirs(1)).replace("Theirs", "Ours")
    assert Ours(1, rest=(2,)) == Theirs(1, rest=(2,)) == (1, "none", (2,))
    assert Ours(1)._replace(key=2).key == 2


def test_it_has_fields_whether_annotations_are_text_or_not():
    """From Python 3.14 on, a class has a function for annotations that are no text."""
    rows = "class Row(NamedTuple):\n key: int\n number: int = 3\n"
    for head in ("", "from __future__ import annotations\n"):
        names = {"NamedTuple": NamedTuple, "__name__": __name__}
        exec(compile(head + rows, "rows", "exec", dont_inherit=True), names)
        assert names["Row"]._fields == ("key", "number")
        assert names["Row"](1) == (1, 3)


def test_it_has_the_methods_of_the_class_statement():
    assert Ours.of_text("abc") == (3, "abc", ())
    assert Ours(4).doubled == 8


def test_it_is_a_plain_tuple_class_that_pickles():
    assert Ours.__mro__ == (Ours, tuple, object)
    assert Ours.__module__ == __name__
    assert Ours.__qualname__ == "Ours"
    assert pickle.loads(pickle.dumps(Ours(5))) == Ours(5)


def test_a_field_that_is_missing_or_unknown_is_refused():
    with pytest.raises(TypeError, match="key"):
        Ours()
    with pytest.raises(TypeError, match="nope"):
        Ours(1, nope=2)
    with pytest.raises(AttributeError):
        Ours(1).key = 2
