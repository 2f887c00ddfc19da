"""The table of APIs: ours beside Kafka's; test_answers holds each to its broker."""

from __future__ import annotations

import json

from mpbroker.cli import main
from mpbroker.cli.api_table import KAFKA_VERSIONS, our_versions
from mpbroker.protocol.api_key import ApiKey


def rows(capsys, *options: str) -> dict[str, dict]:
    assert main(["api-table", "--format", "json", *options]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_each_api_has_a_row_with_both_versions(capsys):
    found = rows(capsys)
    assert len(found) == len(KAFKA_VERSIONS | our_versions()) >= 75
    assert found["METADATA"] == {
        "api_key": 3,
        "name": "METADATA",
        "mpbroker": [0, 13],
        "kafka": [0, 13],
    }


def test_only_different_ones_are_listed_if_that_is_asked_for(capsys):
    names = {
        key.name for key in ApiKey if our_versions().get(key) != KAFKA_VERSIONS.get(key)
    }
    assert rows(capsys, "--different").keys() == names
    assert main(["api-table", "--different"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == len(names)
    missing = KAFKA_VERSIONS.keys() - our_versions().keys()
    assert sum(line.endswith("not served") for line in lines) == len(missing)
