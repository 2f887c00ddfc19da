"""Patterns of topics mean what they mean in Java; Java itself is asked where it is."""

from __future__ import annotations

import random

import pytest

from mpbroker.spark.options import OptionError, parse_subscription
from mpbroker.spark.topic_pattern import TopicPatternError, compile_topic_pattern

NAMES = [
    *("a", "b", "A", "Z", "0", "7", "_", "-", ".", "ab", "aB", "Ab", "AB", "ba", "aa"),
    *(
        "topic",
        "Topic",
        "topic2",
        "topic-2",
        "topic.2",
        "a.b",
        "a_b",
        "a-b",
        "x9",
        "9x",
    ),
    *("abc", "aab", "aba", "aaa", "AbAb", "abab", "orders.v1", "orders-v1", "K", "k"),
    *(
        "s",
        "S",
        "b-c",
        "q",
        "e",
        "QE",
        "f0",
        "fF",
        "g",
        "G",
        "aaaa",
        "1.2.3",
        "..",
        "x-",
    ),
]
# Each with what it matches among a few names.
KNOWN = [
    (r"\p{Lower}+2", {"topic2"}),
    (r"\p{javaUpperCase}.*", {"Topic", "K"}),
    (r"[a-z&&[^t]]+", {"abc"}),
    (r"\Qa.b\E", {"a.b"}),
    (r"a\x2eb|\p{IsDigit}", {"a.b", "7"}),
    (r"(?i)TOPIC", {"Topic"}),
    (r"t(?i)OPIC2|K", {"topic2", "K"}),
    (r"[^\W\d_]++2?+", {"topic2", "Topic", "K", "abc"}),
    (r"(?>a|ab)c", set()),
    (r"\p{L}+\.\p{Alpha}", {"a.b"}),
]
REFUSED = [
    ("", "empty"),
    ("a**", "nothing that"),
    ("a{2}{1}", "nothing that"),  # Java would repeat nothing once
    ("(a", "not closed"),
    ("a)", r"without a \("),
    ("[a", "not closed"),
    ("[]", "not closed"),
    ("[b-a]", "below its beginning"),
    ("a{2,1}", "below its beginning"),
    ("a{,2}", "behind { there must be"),
    (r"\p{lower}", "unknown"),
    (r"\p{IsGreek}", "no topic's name has"),
    (r"\y", r"no \\y"),
    ("a\\", "behind the last"),
    (r"(?x)a b", "flag x"),
    (r"(?<=a+)b", "Python cannot"),
    (r"(?P<n>a)", "no such kind"),
    (r"\1(a)", "behind the end of group 1"),
    (r"\k<n>", "name a group before it"),
    (r"[a&&]", "nothing behind &&"),
    (r"\x4", "must be a number"),
    (r"\N{NO SUCH}", "must name a character"),
    (r"\b{g}", "not supported"),
]
# Further ones, for which Java says what is right.
FURTHER = [
    *(r"[^a]+", r"[\w&&\D]+", r"[a-c[x-z]]+", r"[^a-c[0-9]]+", r"[]a]+", r"[a-]+"),
    *(r"[\d-z]+", r"[a&&b&&c]|q", r"[a-f&&[^b]&&[a-c]]+", r"[^a&&b]+", r"[a&b]+"),
    *(r"\h|\v|\s|a", r"\H+", r"\S+", r"\V{2}", r"\R|\X", r"\0141", r"\061?x?9"),
    *(r"\u0061.*", r"\x{61}b?", r"\cA|a", r"\tb|b", r"\e|e", r"(?:a|b){2,3}+"),
    *(r"(a)(b)?\1", r"(?<n>a|b)\k<n>", r"(?i)(a)b\1b", r"(a)\10", r"(?i:AB)c|abc"),
    *(r"(?i)[a-f]+", r"(?i)[^a]+", r"(?i)\p{Lower}+", r"(?i)\p{Lu}", r"(?iu)\u017f"),
    *(r"(?i)\u017f|k", r"(?iu)\u212a", r"(?i-i)a|A", r"((?i)a)b", r"(?s-m)a.b"),
    *(r"a(?=b).*", r"a(?!b).*", r".*(?<=b)", r".*(?<!b)", r"^a$|^$", r"\Aab\z|a\Z"),
    *(r"\ba\b.*", r"\Ba|.\B.", r"\Ga", r"(?=a)*a", r"(?:^)*a", r"(^|x)9.*", r"a*?b"),
    *(r"a?+a", r"a*+b", r"(a*)*b", r"(a|ab)(c|bcd)?", r"a||b", r"|a", r"()a", r"}a|a"),
    *(r"\p{Punct}+", r"\P{Punct}+", r"\pL+", r"\PL+", r"\p{IsL}+", r"\p{gc=Lu}.*"),
    *(r"\p{IsLatin}+", r"\p{sc=Common}+", r"\p{InBasicLatin}+", r"\p{blk=BasicLatin}"),
    *(r"\p{IsAlphabetic}+", r"\p{IsHex_Digit}+", r"\p{XDigit}+", r"\p{LC}+", r"\p{Pd}"),
    *(r"\p{javaLetterOrDigit}+", r"\p{javaJavaIdentifierStart}+", r"\p{L1}+"),
    *(r"\p{Blank}|\p{Cntrl}|\p{Space}|a", r"\p{Graph}+", r"\p{Print}", r"\p{ASCII}+"),
    *(r"(?U)\w+", r"(?U)\p{Punct}+", r"(?U)\p{Lower}+", r"\Qa\Eb*", r"[\Q.-\E]+"),
    *(r"\Q..", r"a\.b|\_|\-", r"[.]+", r"[\.\-]", r"[+--]", r"[a-z&&^b]+"),
    *(r"[\p{Lower}&&[^\p{XDigit}]]+", r"[\p{L}-]+", r"[-a]+", r"[^-a]+", r"[a-\x63]+"),
    *(r"\N{FULL STOP}+", r"a.++c|a.+c", r"(?<!a)b", r"(?i)\QaB\E", r"[(?*{]|a", r"a]"),
]


def matches(pattern, names=NAMES):
    compiled = compile_topic_pattern(pattern)
    return {name for name in names if compiled.fullmatch(name)}


def found_in(pattern, names=NAMES):
    compiled = compile_topic_pattern(pattern)
    return {name for name in names if compiled.search(name)}


@pytest.mark.parametrize(("pattern", "expected"), KNOWN)
def test_patterns_of_java_are_understood(pattern, expected):
    names = ["topic2", "Topic", "K", "abc", "a.b", "7"]
    assert matches(pattern, names) == expected
    assert parse_subscription({"subscribepattern": pattern}).pattern == pattern


@pytest.mark.parametrize(("pattern", "reason"), REFUSED)
def test_what_is_no_pattern_or_cannot_be_had_is_refused(pattern, reason):
    with pytest.raises(OptionError, match=f"subscribePattern.*{reason}"):
        parse_subscription({"subscribepattern": pattern})


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("pre-1", {"pre-1", "pre-1-post", "x-pre-1"}),
        ("^pre-1", {"pre-1", "pre-1-post"}),
        ("pre-1$", {"pre-1", "x-pre-1"}),
        ("^pre-1$", {"pre-1"}),
        ("865764", {"t-865764-a"}),
        ("[0-9]{2}", {"t-865764-a"}),
        (r"(?<!x-)pre|\Qno\E", {"pre-1", "pre-1-post"}),
    ],
)
def test_a_pattern_is_found_anywhere_in_a_name(pattern, expected):
    names = ["pre-1", "pre-1-post", "x-pre-1", "t-865764-a"]
    assert found_in(pattern, names) == expected


@pytest.fixture(scope="module")
def java(spark):
    """Return what Java's own pattern matches, or None if it refuses the pattern.

    The names that it matches as a whole, and those that have a match anywhere.
    """
    from py4j.protocol import Py4JJavaError

    jvm = spark.sparkContext._jvm
    names = jvm.java.util.ArrayList()
    for each in NAMES:
        names.add(each)

    def matched(pattern):
        try:
            compiled = jvm.java.util.regex.Pattern.compile(pattern)
        except Py4JJavaError:
            return None
        return tuple(
            set(names.stream().filter(each).toList().toString()[1:-1].split(", "))
            - {""}
            for each in (compiled.asMatchPredicate(), compiled.asPredicate())
        )

    return matched


def test_java_agrees(java):
    for pattern in [*FURTHER, *(pattern for pattern, _ in KNOWN)]:
        assert (matches(pattern), found_in(pattern)) == java(pattern), pattern


def test_java_agrees_about_patterns_made_of_random_pieces(java):
    pieces = [
        *("a", "b", "A", "[", "]", "^", "&&", "-", "(", ")", "(?:", "|", "*", "+", "?"),
        *("{2}", ".", r"\.", r"\w", r"\d", r"\p{Lower}", r"\P{L}", "(?i)", r"\1", "z"),
        *("[a-c]", "[^b]", "(a|b)", r"\Q", r"\E", "(?=", "{", "}", "$", "_"),
    ]
    seed = random.randrange(1 << 32)
    moment = random.Random(seed)
    understood = 0
    for _ in range(500):
        pattern = "".join(moment.choices(pieces, k=moment.randint(1, 7)))
        try:
            found = matches(pattern), found_in(pattern)
        except TopicPatternError:
            continue
        assert found == java(pattern), f"{pattern!r}, seed {seed}"
        understood += 1
    assert understood > 50
