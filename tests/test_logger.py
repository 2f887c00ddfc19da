"""Loggers that obey levels which others may set at any time."""

from __future__ import annotations

import logging
import subprocess
import sys
import uuid

import pytest

from mpbroker.base.logger import LEVELS, ROOT, follow, get_logger


class Levels:
    """What others have set."""

    def __init__(self) -> None:
        self.version = 0
        self.levels: dict[str, int] = {}

    def read(self) -> dict[str, int]:
        return dict(self.levels)

    def set(self, **levels: int) -> None:
        self.levels = levels
        self.version += 1


@pytest.fixture
def levels():
    made = Levels()
    before = logging.getLogger().level
    follow(made)
    yield made
    made.set()
    get_logger("any").isEnabledFor(0)
    follow(None)
    logging.getLogger().setLevel(before)


def test_a_line_is_written_or_not_by_the_level_there_is_when_it_is_logged(levels):
    name = f"test{uuid.uuid4().hex}"
    logger = get_logger(f"{name}.of.this")
    for level in LEVELS.values():
        levels.set(**{name: level})
        for other in LEVELS.values():
            assert logger.isEnabledFor(other) == (other >= level)


def test_the_nearest_one_counts_and_without_it_the_one_above(levels):
    name = f"test{uuid.uuid4().hex}"
    logger = get_logger(f"{name}.of.this")
    levels.set(**{ROOT: LEVELS["ERROR"], name: LEVELS["TRACE"]})
    assert logger.isEnabledFor(LEVELS["TRACE"])
    levels.set(**{ROOT: LEVELS["ERROR"]})
    assert not logger.isEnabledFor(LEVELS["WARN"])
    levels.set()
    assert logger.isEnabledFor(LEVELS["INFO"])
    assert not logger.isEnabledFor(LEVELS["DEBUG"])


def test_who_has_set_nothing_finds_logging_as_it_was(levels):
    logging.getLogger().setLevel(LEVELS["FATAL"])
    assert not get_logger("mpbroker.any").isEnabledFor(LEVELS["ERROR"])


def test_whatever_a_client_calls_itself_a_message_is_one_line():
    program = (
        "from mpbroker.base.logger import get_logger, log_to_stderr\n"
        "log_to_stderr()\n"
        "log = get_logger('a')\n"
        "log.info('%s: closed: %s', 'k\u00fcche', 'x\\n2026 ERROR y\\x1b[2J\\u2028')\n"
        "try:\n    1 / 0\n"
        "except ZeroDivisionError:\n    log.exception('by zero')\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", program],
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=True,
    )
    first, second, *traceback = done.stderr.splitlines()
    assert first.endswith(" a: k\u00fcche: closed: x" + r"\n2026 ERROR y\x1b[2J\u2028")
    assert second.endswith(" a: by zero")
    assert traceback[0].startswith("  | Traceback") and len(traceback) > 2


def test_whatever_is_in_an_error_its_traceback_begins_no_line_of_the_log():
    program = (
        "from mpbroker.base.logger import get_logger, log_to_stderr\n"
        "log_to_stderr()\n"
        "log = get_logger('a')\n"
        "try:\n"
        "    raise ValueError('x\\n2026 ERROR y\\r2026\\x1b[2J\\u2028k\u00fcche')\n"
        "except ValueError:\n    log.exception('odd', stack_info=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", program],
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=True,
    )
    first, *others = done.stderr.splitlines()
    assert first.endswith(" a: odd")
    assert all(line.startswith("  | ") for line in others)
    at = others.index("  | ValueError: x")
    assert others[at + 1] == r"  | 2026 ERROR y\r2026\x1b[2J\u2028" + "k\u00fcche"
    assert "  | Stack (most recent call last):" in others
