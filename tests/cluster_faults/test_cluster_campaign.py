"""A short campaign against three nodes; and what a ledger complains of."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from mpbroker.testing.postgresql import programs, what_lacks
from tests.cluster_faults.ledger import Ledger, Walk, parse, value
from tests.support.promises import promised


@pytest.mark.timeout(600)
def test_no_record_and_no_offset_is_lost_though_nodes_die():
    if programs() is None:
        pytest.skip(what_lacks())
    seed = random.randrange(1 << 30)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.cluster_faults", "4"),
            *("--seed", f"{seed}", "--rate", "90", "--calm", "2"),
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    with promised("no record and no offset is lost though nodes die"):
        assert "BROKEN:" not in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 complaints" in done.stdout


# -- records ---------------------------------------------------------------------------


def written(count=10):
    """Return a ledger of records that "a" and the plain "p" have written in turn."""
    ledger = Ledger(1, ["a"], ["p"], ["g"])
    for number in range(count):
        ledger.acknowledge("a", 0, number, 2 * number)
        ledger.acknowledge("p", 0, number, 2 * number + 1)
    assert not ledger.complaints
    return ledger


def shown(count=10):
    return [value(name, 0, number) for number in range(count) for name in "ap"]


def complaints(ledger, contents, offsets=None):
    """Walk over values, and return what is complained of."""
    walk = Walk(ledger, "node 1", 0)
    for offset, content in zip(offsets or range(len(contents)), contents, strict=True):
        walk.take(offset, content)
    walk.end()
    return "\n".join(ledger.complaints)


def test_a_value_says_where_it_comes_from():
    assert parse(value("a", 3, 17)) == ("a", 3, 17)
    for wrong in (None, b"", b"a:3:17:", value("a", 3, 17)[:-1] + b"?", b"\xff:1:2:3"):
        assert parse(wrong) is None


def test_what_was_acknowledged_and_is_there_is_no_complaint():
    ledger = written()
    assert complaints(ledger, shown()) == ""
    assert complaints(ledger, shown()) == ""  # at another node
    assert ledger.checked == 40 and ledger.end(0) == 20


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found: found.pop(), "p number 9 is not at 19"),
        (lambda found: found.pop(-2), "a number 9 is lost"),
        (lambda found: found.pop(4), "a number 3 is there without 2"),
        (lambda found: found.insert(4, value("a", 0, 1)), "a number 1 is there again"),
        (
            lambda found: found.append(value("p", 0, 4)),
            "p number 4 is there 2 times, and was sent 1 times",
        ),
        (lambda found: found.append(value("a", 0, 10)), "a has 11 records"),
        (lambda found: found.append(value("b", 0, 0)), "nobody has written b'b:0:0:"),
        (lambda found: found.append(value("a", 1, 0)), "0@20 has b'a:1:0:"),
        (lambda found: found.append(None), "0@20 has None"),
        (
            lambda found: found.__setitem__(slice(0, 3, 2), found[2::-2]),
            "0@0 has a number 1, acknowledged at 2",
        ),
        (
            lambda found: found.__setitem__(slice(1, 4, 2), found[3::-2]),
            "p number 0 is not at 1",
        ),
        (lambda found: found.__setitem__(6, found[6][:-1] + b"?"), "0@6 has b'a:0:3:"),
    ],
)
def test_a_log_with_other_records_is_a_complaint(change, says):
    found = shown()
    change(found)
    assert says in complaints(written(), found)


def test_a_gap_is_a_complaint():
    ledger = Ledger(1, ["a"])
    ledger.acknowledge("a", 0, 0, 0)
    ledger.acknowledge("a", 0, 1, 2)
    says = complaints(ledger, [value("a", 0, 0), value("a", 0, 1)], [0, 2])
    assert says == "node 1: partition 0, below 1: offset 2 follows 0"


def test_other_bytes_at_another_node_are_a_complaint():
    ledger = Ledger(1, [], ["p"])
    ledger.show("node 1", 0, 5, value("p", 0, 1))
    ledger.show("node 2", 0, 5, value("p", 0, 1))
    assert not ledger.complaints
    ledger.show("node 3", 0, 5, value("p", 0, 2))
    (complaint,) = ledger.complaints
    assert "node 3: 0@5" in complaint and "others had other bytes" in complaint


def test_a_plain_producer_s_record_may_be_there_as_often_as_it_was_sent():
    ledger = written()
    ledger.sent_again("p", 0, 4)
    assert complaints(ledger, [*shown(), value("p", 0, 4)]) == ""
    assert "is there 3 times" in complaints(ledger, [*shown(), *[value("p", 0, 4)] * 2])


def test_so_may_one_that_is_under_way_as_all_die_that_know_of_it():
    ledger = written()
    ledger.may_be_sent_again()
    ledger.acknowledge("p", 0, 10, 20)
    again = value("p", 0, 10)
    assert complaints(ledger, [*shown(), again, again]) == ""
    found = complaints(ledger, [*shown(), again, again, value("p", 0, 9)])
    assert "p number 9 is there 2 times" in found


def test_a_record_that_is_not_acknowledged_yet_may_be_there():
    ledger = written()
    walk = Walk(ledger, "along the way", 0)
    for offset, content in enumerate([*shown(), value("a", 0, 10), value("p", 0, 10)]):
        walk.take(offset, content)
    assert not ledger.complaints
    ledger.acknowledge("a", 0, 10, 20)
    ledger.acknowledge("p", 0, 10, 21)
    assert complaints(ledger, shown(11)) == ""


@pytest.mark.parametrize(
    ("number", "offset", "says"),
    [
        (10, 18, "a:0:10 was acknowledged at 18, the one before it at 18"),
        (11, 30, "a:0:11 was acknowledged, and 10 was to come"),
        (9, 30, "a:0:9 was acknowledged, and 10 was to come"),
    ],
)
def test_answers_in_another_order_are_a_complaint(number, offset, says):
    ledger = written()
    ledger.acknowledge("a", 0, number, offset)
    assert ledger.complaints == [says]


def test_an_answer_without_an_offset_fits_any_place():
    ledger = written()
    ledger.acknowledge("a", 0, 10, None)
    ledger.acknowledge("p", 0, 10, 21)
    assert complaints(ledger, shown(11)) == ""


# -- groups ----------------------------------------------------------------------------


def read(*offsets):
    ledger = Ledger(1, ["a"], groups=["g"])
    for each in offsets:
        ledger.read("g", 0, each)
    return ledger


def test_a_group_may_commit_what_its_members_have_read_in_any_order():
    ledger = read(0, 1, 3, 4, 2, 1)
    ledger.commit("g", ledger.floor("g"), {0: 5})
    ledger.observe("g", ledger.floor("g"), {0: 5})
    assert not ledger.complaints and ledger.floor("g") == [5]


@pytest.mark.parametrize("judge", [Ledger.commit, Ledger.observe])
def test_a_record_that_nobody_has_read_is_not_to_be_committed(judge):
    ledger = read(0, 1, 3)
    judge(ledger, "g", [0], {0: 4})
    (complaint,) = ledger.complaints
    assert complaint.endswith("0@4, and nobody has read 2")


@pytest.mark.parametrize("judge", [Ledger.commit, Ledger.observe])
@pytest.mark.parametrize("offset", [2, 0, -1])
def test_a_committed_offset_never_goes_back(judge, offset):
    ledger = read(0, 1, 2)
    ledger.commit("g", [0], {0: 2})
    before = ledger.floor("g")
    ledger.commit("g", before, {0: 3})
    judge(ledger, "g", before, {0: 2})  # it was asked before
    assert not ledger.complaints
    judge(ledger, "g", ledger.floor("g"), {0: offset})
    (complaint,) = ledger.complaints
    assert complaint.endswith(f"0@{offset}, after 3")
