"""Man pages and references, made of what commands and settings say of themselves."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from deploy import manuals
from mpbroker.cli.root import COMMANDS
from mpbroker.config import BROKER_CONFIG_DEF
from mpbroker.metadata.log_config_def import LOG_CONFIG_DEF


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("man")
    return {path.stem: path for path in manuals.write_man_pages(folder, "2026-01-31")}


def each(page):
    """Yield a command and all below it."""
    yield page
    for below in page.commands:
        yield from each(below)


def test_every_command_has_a_man_page(pages):
    assert set(pages) == {"mpbroker", *(f"mpbroker-{name}" for name in COMMANDS)}


@pytest.mark.skipif(shutil.which("groff") is None, reason="no groff")
@pytest.mark.parametrize(
    "name", ["mpbroker", *(f"mpbroker-{name}" for name in COMMANDS)]
)
def test_groff_finds_nothing_wrong_in_a_page_and_shows_its_options(pages, name):
    done = subprocess.run(
        ["groff", "-man", "-ww", "-Tutf8", "-P-cbou", str(pages[name])],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert not done.stderr
    shown = " ".join(done.stdout.split())
    (page,) = (page for page in each(manuals.manual()) if "-".join(page.words) == name)
    for spelling, _ in page.options:
        assert " ".join(spelling.split()) in shown


def test_the_reference_of_commands_has_every_command_and_option():
    text = manuals.command_reference()
    for page in each(manuals.manual()):
        if len(page.words) > 1:
            assert re.search(rf"^#+ {re.escape(page.name)}$", text, re.M), page.name
        for spelling, _ in page.options:
            assert len(page.words) == 1 or f"`{spelling}`".replace("|", "\\|") in text


def test_the_reference_of_settings_has_every_setting_with_its_facts():
    text = manuals.setting_reference()
    heads = re.findall(r"^### (.*)$", text, re.M)
    names = (
        [key.name for key in BROKER_CONFIG_DEF],
        [key.name for key in LOG_CONFIG_DEF],
    )
    assert heads == [*sorted(names[0]), *sorted(names[1])]
    own = text.partition("### num.io.threads\n")[2].partition("\n### ")[0]
    assert "| accepts | a whole number of 32 bits, between 1 and 119 |" in own
    assert "| default | computed from the machine |" in own
    assert "| changes while the broker serves | cluster-wide |" in own
    of_topics = text.partition("## Of topics")[2]
    own = of_topics.partition("### retention.ms\n")[2].partition("\n### ")[0]
    assert "| default from | `log.retention.ms`, `log.retention.minutes`" in own


def test_what_markdown_would_take_for_html_is_escaped():
    assert manuals._escaped("a <b> *c* `<d>`") == r"a \<b\> \*c\* `<d>`"
    assert manuals._roff(".so x\\y") == "\\&.so x\\ey"
