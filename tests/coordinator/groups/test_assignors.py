"""The assignors: they assign all partitions evenly, and move few of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.coordinator.groups.assignors import ASSIGNORS, MemberSpec

topic_counts = st.dictionaries(
    st.sampled_from([b"a", b"b", b"c"]), st.integers(1, 9), min_size=1
)


@st.composite
def questions(draw, *, alike=False):
    topics = draw(topic_counts)
    count = draw(st.integers(1, 6))
    same = frozenset(draw(st.sets(st.sampled_from(sorted(topics)))))
    members = []
    for number in range(count):
        wanted = same
        if not alike:
            wanted = frozenset(draw(st.sets(st.sampled_from(sorted(topics)))))
        members.append(MemberSpec(f"m{number}", None, wanted, {}))
    return members, topics


def everything(members, topics):
    wanted = set().union(*(member.topics for member in members))
    return {(t, n) for t, count in topics.items() if t in wanted for n in range(count)}


def shares(answer):
    return {
        member_id: {(t, n) for t, numbers in share.items() for n in numbers}
        for member_id, share in answer.items()
    }


@pytest.mark.parametrize("name", ASSIGNORS)
@given(questions())
def test_every_partition_goes_to_one_member_that_wants_it(name, question):
    members, topics = question
    found = shares(ASSIGNORS[name](members, topics))
    assert set(found) == {member.member_id for member in members}
    together = [each for share in found.values() for each in share]
    assert len(together) == len(set(together))
    assert set(together) == everything(members, topics)
    for member in members:
        assert {topic for topic, _ in found[member.member_id]} <= member.topics


@given(questions(alike=True))
def test_uniform_gives_everybody_the_same_number(question):
    sizes = [len(each) for each in shares(ASSIGNORS["uniform"](*question)).values()]
    assert max(sizes) - min(sizes) <= 1


@given(questions())
def test_uniform_gives_no_member_two_more_than_another_that_wants_them(question):
    members, topics = question
    found = shares(ASSIGNORS["uniform"](members, topics))
    for giver in members:
        for topic, _ in found[giver.member_id]:
            for taker in members:
                if topic in taker.topics:
                    difference = len(found[giver.member_id]) - len(
                        found[taker.member_id]
                    )
                    assert difference < 2


@given(questions(alike=True), st.data())
def test_uniform_moves_no_more_than_it_must(question, data):
    members, topics = question
    before = ASSIGNORS["uniform"](members, topics)
    gone = data.draw(st.integers(0, len(members) - 1))
    left = [
        member._replace(assigned=before[member.member_id])
        for number, member in enumerate(members)
        if number != gone or len(members) == 1
    ]
    after = shares(ASSIGNORS["uniform"](left, topics))
    for member in left:
        assert shares(before)[member.member_id] <= after[member.member_id]
    newcomer = MemberSpec("new", None, members[0].topics, {})
    more = [
        *(m._replace(assigned=before[m.member_id]) for m in members),
        newcomer,
    ]
    after = shares(ASSIGNORS["uniform"](more, topics))
    for member in members:
        assert after[member.member_id] <= shares(before)[member.member_id]


@given(questions())
def test_range_gives_runs_and_the_same_numbers_of_equal_topics(question):
    members, topics = question
    found = ASSIGNORS["range"](members, topics)
    for share in found.values():
        for numbers in share.values():
            assert max(numbers) - min(numbers) == len(numbers) - 1
    wanted = members[0].topics
    if all(member.topics == wanted for member in members):
        for share in found.values():
            for one, other in zip(sorted(share), sorted(share)[1:], strict=False):
                if topics[one] == topics[other]:
                    assert share[one] == share[other]


def test_a_thousand_members_are_assigned_at_once():
    topics = {b"%03d" % number: 20 for number in range(100)}
    members = [MemberSpec(f"m{n}", None, frozenset(topics), {}) for n in range(1000)]
    for assign in ASSIGNORS.values():
        assert sum(map(len, shares(assign(members, topics)).values())) == 2000
