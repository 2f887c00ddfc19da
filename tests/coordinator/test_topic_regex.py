"""Topic patterns mean what Python's engine says, and take no time for it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.coordinator.topic_regex import InvalidRegexError, TopicRegex

atoms = st.sampled_from(
    ["a", "b", "-", r"\.", ".", "[ab]", "[^a]", "[a-c.]", r"\d", r"\w", "1", "^", "$"]
)
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map("".join),
        st.tuples(inner, inner).map("|".join),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
        inner.map("({})".format),
    ),
    max_leaves=8,
)


@given(patterns, st.lists(st.text("abc1.-", max_size=6), min_size=1, max_size=5))
def test_a_pattern_matches_what_pythons_engine_matches(pattern, names):
    ours, theirs = TopicRegex(pattern), re.compile(pattern)
    for name in names:
        expected = theirs.fullmatch(name) is not None
        # In Python a $ matches before a final line feed; names have none.
        assert ours.matches(name) is expected, (pattern, name)


@given(st.text(max_size=30))
def test_any_text_is_a_pattern_or_refused(text):
    try:
        regex = TopicRegex(text)
    except InvalidRegexError:
        return
    regex.matches("some-topic")


@pytest.mark.parametrize(
    "pattern",
    ["(", ")", "[a", "*a", "a**b(", r"\1", "(?=a)", "(?i)a", "a{1001}", "\\", "[[:x:]]",
     "(a{500}){500}", "(" * 200, "x" * 5000, "[b-a]", "a*+", "a{1}" + "?" * 4000,
     "a" + "{1}" * 1000, "(){1000}{1000}"],
)  # fmt: skip
def test_what_is_no_pattern_or_too_large_is_refused(pattern):
    with pytest.raises(InvalidRegexError):
        TopicRegex(pattern)


def test_a_pattern_that_makes_others_backtrack_for_ever():
    assert not TopicRegex("(a*)*(a+)+b").matches("a" * 249)
    assert TopicRegex("(a|a|a)*(a*)*").matches("a" * 249)


@pytest.mark.parametrize("nothing", ["()", "a{0}", "(()|){0}", "(){1000}()"])
def test_nothing_that_is_repeated_very_often_takes_no_time(nothing):
    pattern = nothing
    for _ in range(50):
        pattern = f"({pattern}){{1000}}"
    assert TopicRegex(f"a{pattern}b{pattern}").matches("ab")


@pytest.mark.parametrize("inner", ["({})*", "(a|({})*)*", "(?:{}|b){{0,}}"])
def test_groups_as_deep_as_they_may_be_are_understood(inner):
    pattern = "a"
    for _ in range(99 // inner.count("(")):
        pattern = inner.format(pattern)
    assert TopicRegex(pattern).matches("a")


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("orders-.*", "orders-eu", True),
        ("orders-.*", "my-orders-eu", False),
        ("(?P<x>a)b", "ab", True),
        ("[[:alpha:]]+", "abc", True),
        (r"\Aa\z", "a", True),
        ("", "", True),
        ("", "a", False),
    ],
)
def test_the_whole_name_must_match(pattern, name, expected):
    assert TopicRegex(pattern).matches(name) is expected
