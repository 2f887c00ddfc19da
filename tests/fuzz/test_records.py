"""A second of fuzzing the loops over records; scripts/check-core runs it longer."""

from __future__ import annotations

from random import Random

import pytest

from mpbroker.protocol.records import record_columns, record_encode
from tests.fuzz import records
from tests.fuzz.records import DifferentTwinsError

pytestmark = pytest.mark.skipif(
    not (record_columns.IS_COMPILED and record_encode.IS_COMPILED),
    reason="built without a compiler",
)


def play(count: int) -> None:
    for number in range(count):
        records.run(Random(number), number)


def test_the_twins_agree_on_hostile_records() -> None:
    play(2000)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("walk_records_in_python", lambda *_: (0, 0, 0, 0, 0, 0)),
        ("read_columns_in_python", lambda *_: None),
        ("encode_records_in_python", lambda records: (b"x", 0, 0)),
    ],
)
def test_twins_that_do_not_agree_are_found(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: object
) -> None:
    monkeypatch.setattr(records, name, wrong)
    with pytest.raises(DifferentTwinsError):
        play(50)
