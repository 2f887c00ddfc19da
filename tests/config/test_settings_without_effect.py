"""A setting that nothing reads says so, and only such a one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from mpbroker.config.broker_config import BROKER_CONFIG_DEF
from mpbroker.metadata.log_config_def import BROKER_SYNONYMS, LOG_CONFIG_DEF

PACKAGE = Path(__file__).resolve().parents[2] / "mpbroker"
SYNONYMS = {each.name for several in BROKER_SYNONYMS.values() for each in several}
ROWS = {
    *("ConfigKey", "BrokerKey", "TopicKey", "_topic_default"),
    *("_rows", "_rows_of_listeners"),
}


def words_of(node: ast.AST) -> Iterator[str]:
    """What code says, in attributes and strings, outside definitions of keys."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ROWS:
        return
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from words_of(child)


# What runs in a broker: clients have settings of the same names.
BROKERS = (
    *("broker", "config", "coordinator", "exporter"),
    *("inspect", "network", "server", "supervisor"),
)


@cache
def said(*packages: str) -> set[str]:
    return {
        word
        for package in packages or ("",)
        for path in (PACKAGE / package).rglob("*.py")
        for word in words_of(ast.parse(path.read_text()))
    }


def test_settings_that_nothing_reads_say_so_and_no_others_do():
    words = said(*BROKERS)
    # f"{prefix}.expected.audience"
    tails = tuple(word for word in words if word.startswith(".") and "." in word[1:])
    unread = {
        key.name
        for key in BROKER_CONFIG_DEF
        if not words & {key.name, key.name.replace(".", "_")}
        and not key.name.endswith(tails)
    }
    # What only supplies a default of topics is read as the topics' key.
    admitted = {
        key.name
        for key in BROKER_CONFIG_DEF
        if not key.has_effect and key.name not in SYNONYMS
    }
    assert unread - SYNONYMS == admitted


def test_settings_of_topics_that_nothing_reads_say_so_and_no_others_do():
    unread = {
        key.name
        for key in LOG_CONFIG_DEF
        if key.name.replace(".", "_") not in said()
        # f"compression_{codec}_level"
        and not re.fullmatch(r"compression\.\w+\.level", key.name)
    }
    admitted = {key.name for key in LOG_CONFIG_DEF if not key.has_effect}
    assert unread == admitted
