"""The settings of a broker of Apache Kafka 4.4.0, as its own documentation has them.

    python -m tests.config.kafka_keys > tests/config/kafka_keys.tsv

makes the table beside this module anew, of Kafka's jars. Keys that Kafka calls internal
are not in it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.support.apache_kafka import java_command

TABLE = Path(__file__).with_suffix(".tsv")


class KafkaKey(NamedTuple):
    """One key; the default is None if there is none, "" if the key has to be set."""

    name: str
    type: str
    default: str | None
    valid: str
    importance: str
    update_mode: str


def kafka_keys() -> list[KafkaKey]:
    """Return the table beside this module."""
    return [
        KafkaKey(*(None if text == "null" else text for text in line.split("\t")))
        for line in TABLE.read_text().splitlines()
    ]


def table_of_jars() -> str:
    """Return the table of Kafka's jars, which print it as HTML."""
    told = subprocess.run(
        java_command("kafka.server.KafkaConfig"), check=True, capture_output=True
    ).stdout.decode()
    lines = []
    for item in told.split("<h4>")[1:]:
        name = re.findall(r'<a id="([^"]+)"', item)[0]
        cells = dict(re.findall(r"<tr><th>(.*?):</th><td>(.*?)</td>", item))
        default = re.sub(r" \([^()]*\)$", "", cells["Default"])  # 1000 (1 second)
        default = "" if default == '""' else default
        lines.append(
            "\t".join(
                [
                    name,
                    cells["Type"],
                    default,
                    cells["Valid Values"],
                    cells["Importance"],
                    cells["Update Mode"],
                ]
            )
        )
    return "\n".join(sorted(lines)) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table_of_jars())
