"""Patterns mean what RE2 says, and cost no more than their limits allow."""

from __future__ import annotations

import random
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.base.linear_regex import InvalidRegexError, LinearRegex

atoms = st.sampled_from(
    ["a", "b", "-", r"\.", ".", "[ab]", "[^a]", "[a-c.]", r"\d", r"\D", r"\w", r"\W"]
    + ["1", "B", "^", "$", r"\A", r"\b", "(?i:ab)", r"[\d.]"]
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

FORTY_NAMES = [f"{n:02d}-{random.Random(n).getrandbits(84):021x}" for n in range(40)]


@given(patterns, st.lists(st.text("abAB1.-", max_size=6), min_size=1, max_size=5))
def test_a_pattern_matches_what_pythons_engine_matches(pattern, names):
    ours, theirs = LinearRegex(pattern), re.compile(pattern, re.ASCII)
    for name in names:
        expected = theirs.fullmatch(name) is not None
        # In Python a $ matches before a final line feed; names have none.
        assert ours.matches(name) is expected, (pattern, name)


@given(st.one_of(st.text(max_size=30), st.text(r"ab\pQECx{}()[]?<>:|*+^$19,-é")))
def test_any_text_is_a_pattern_or_refused(text):
    try:
        regex = LinearRegex(text)
    except InvalidRegexError as error:
        assert str(error)
        return
    regex.matches("some-topic")
    regex.matches("ñandú-😀")


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("orders-.*", "orders-eu", True),
        ("orders-.*", "my-orders-eu", False),
        ("orders", "orders-eu", False),
        ("", "", True),
        ("", "a", False),
        ("a|ab", "ab", True),
        (r"\Aa\z", "a", True),
        ("(?m)^a$", "a\nb", False),
        # A character is a character, not a byte.
        ("...", "añ😀", True),
        ("[à-ü]", "ñ", True),
        (".", "\n", False),
        ("(?s).", "\n", True),
    ],
)
def test_the_whole_name_must_match(pattern, name, expected):
    assert LinearRegex(pattern).matches(name) is expected


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("(?i)orders.*", ["ORDERS-eu", "orders"], ["order"]),
        ("(?i:O)rders(?-i)", ["orders"], ["oRDERS"]),
        (r"orders\b.*", ["orders-eu", "orders"], ["orders1"]),
        (r"a\Bb.*", ["abc"], ["a-b"]),
        (r"\p{L}+-\pN+", ["abc-12", "ñ-1"], ["a1-1"]),
        (r"[\p{Lu}\P{L}]+", ["A1"], ["a1"]),
        (r"\p{^Greek}", ["a"], ["Ω"]),
        (r"\Qa.b*\E+", ["a.b*", "a.b**"], ["axb"]),
        (r"\Qa.b", ["a.b"], ["axb"]),
        ("(?P<x>a)b", ["ab"], []),
        ("(?<x>a)b", ["ab"], []),
        ("[[:alpha:]]+", ["abc"], ["ab1"]),
        ("[[:^alpha:]]+", ["12"], ["a"]),
        (r"\x61\x{62}\143", ["abc"], []),
        ("(?U)a+?", ["aaa"], []),
        ("a{,2}", ["a{,2}"], ["aa"]),
        (r"\_", ["_"], []),
        ("|".join(FORTY_NAMES), FORTY_NAMES, [FORTY_NAMES[0][:-1]]),
        ("(?i)" + "|".join(FORTY_NAMES), [FORTY_NAMES[7].upper()], ["x"]),
    ],
)
def test_the_syntax_of_re2_is_understood(pattern, matching, others):
    regex = LinearRegex(pattern)
    assert all(regex.matches(name) for name in matching)
    assert not any(regex.matches(name) for name in others)


@pytest.mark.parametrize(
    "pattern",
    ["(", ")", "[a", "*a", "a|*", "a**", "a*+", "a++", "a{2}{3}", r"\1", r"(a)\1", "\\",
     "(?=a)", "(?!a)", "(?<=a)", "(?<!a)", "(?>a)", "(?#a)", "(?x)a", "(?'n'a)", "(?R)",
     "(?P=n)", "(?P<n-1>a)", "(?P<n", "(?i", "[[:x:]]", "[b-a]", r"\p{Foo}", r"\p{LC}",
     r"\Z", r"\h", r"\e", r"\cA", r"\u0041", r"\x{110000}", "a{1001}", "a{2,1}"],
)  # fmt: skip
def test_a_pattern_that_both_re2_and_re2j_refuse_is_refused(pattern):
    with pytest.raises(InvalidRegexError):
        LinearRegex(pattern)


def test_a_refusal_does_not_repeat_a_long_pattern():
    with pytest.raises(InvalidRegexError) as refusal:
        LinearRegex("(" * 4000)
    assert str(refusal.value).startswith("missing )")
    assert len(str(refusal.value)) <= 200


@pytest.mark.parametrize("pattern", ["(a{500}){500}", r"\é"])
def test_a_pattern_that_re2_refuses_and_re2j_accepts_is_refused(pattern):
    with pytest.raises(InvalidRegexError):
        LinearRegex(pattern)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (r"a\C", "ab"),
        ("(?<n>a)(?<n>b)", "ab"),
        ("(?<é>a)", "a"),
        ("{*", "{{"),
        ("a{12345678901}", "a{12345678901}"),
    ],
)
def test_a_pattern_that_re2_accepts_and_re2j_refuses_is_accepted(pattern, name):
    assert LinearRegex(pattern).matches(name)


# -- limits ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("taken", "refused", "why"),
    [
        ("x" * 4096, "x" * 4097, "4097 bytes"),
        ("é" * 2048, "é" * 2049, "4098 bytes"),
        ("[" + r"\pL\PL" * 16 + "]", "[" + r"\pL\PL" * 16 + r"\pL]", "33 Unicode"),
        ("(?<n>a)" * 16, "(?<n>a)" * 17, "17 named groups"),
        ("(a)" * 1000, "(?<n>a)" * 500, "500 named groups"),
        (r"\pL{8}", r"\pL{1000}", "too large"),
        (".{1000}", "(?:.?){1000}.{1000}", "too large"),
    ],
)
def test_a_pattern_that_would_cost_too_much_is_refused(taken, refused, why):
    LinearRegex(taken)
    with pytest.raises(InvalidRegexError, match=why):
        LinearRegex(refused)


@pytest.mark.parametrize(
    "pattern",
    ["(a*)*(a+)+b", "(?:[ab]|a)*c", "(?:(?:(?:a|)*(?:b|)*){8}){1,112}x",
     "(?:(?<n>(?:a|)*(?:b|)*){1,50}){16}x", "(?:[ab]*a[ab]{40}|[ab]*b[ab]{99})*x"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["a" * 249, "ab" * 124])
def test_a_pattern_that_makes_others_backtrack_for_ever_does_not_match(pattern, name):
    assert not LinearRegex(pattern).matches(name)


@pytest.mark.parametrize("nothing", ["()", "a{0}", "(()|){0}", "(){999}()"])
def test_nothing_that_is_repeated_very_often_takes_no_time(nothing):
    often = without_end = nothing
    for _ in range(50):
        often, without_end = f"({often}){{1000}}", f"({without_end})*"
    assert LinearRegex(f"a{without_end}b{without_end}").matches("ab")
    with pytest.raises(InvalidRegexError, match="repetition size"):
        LinearRegex(often)


@pytest.mark.parametrize("group", ["({})", "(?:{})*", "(a|({})*)*", "(?:{}|b)?"])
def test_groups_as_deep_as_a_pattern_is_long_are_understood(group):
    pattern = "a"
    while len(inner := group.format(pattern)) <= 4096:
        pattern = inner
    assert LinearRegex(pattern).matches("a")


# How much a process grows by 150 patterns that take most, one after the other.
GROWTH = r"""
import resource
from mpbroker.base.linear_regex import LinearRegex

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def use(n):
    LinearRegex(r"(?:" + r"\pL" * 32 + "){0}(?:.){1000}" + str(n)).matches("a" * 249)

use(0)
before = resident()
for n in range(1, 150):
    use(n)
print(resident() - before)
"""


def test_patterns_that_were_used_leave_no_memory_behind():
    grown = int(subprocess.check_output([sys.executable, "-c", GROWTH]))
    assert grown < 8 << 20  # 0.2 MB; 31 MB if re2 remembers the last 128 of them


def test_a_clients_mistake_is_not_written_to_stderr(capfd):
    for pattern in ("(", r"\pL{1000}", "a**"):
        with pytest.raises(InvalidRegexError):
            LinearRegex(pattern)
    # Its automaton does not fit; RE2 would say so, and goes on without.
    LinearRegex(r"(?:\b.*){1000}").matches("a b " * 60)
    assert capfd.readouterr() == ("", "")


# -- the library -----------------------------------------------------------------------

IMPORTS = """
import sys
import mpbroker.broker.coordinator_role
from mpbroker.coordinator.groups.patterns import compile_pattern
assert "re2" not in sys.modules
compile_pattern("a")
assert "re2" in sys.modules
"""


def test_a_coordinator_imports_re2_with_its_first_pattern():
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)


def test_where_re2_is_missing_a_pattern_is_refused_and_told_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "re2", None)
    with pytest.raises(InvalidRegexError, match="google-re2 is not installed"):
        LinearRegex("a")
