"""Man pages and references, made of what commands and settings say of themselves."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess

import pytest

import mpbroker
from deploy import manuals
from deploy import python_reference as python
from mpbroker import extensions
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
    tables = BROKER_CONFIG_DEF, LOG_CONFIG_DEF, *manuals.OTHER_SETTINGS.values()
    assert heads == [
        name for table in tables for name in sorted(key.name for key in table)
    ]
    own = text.partition("### num.io.threads\n")[2].partition("\n### ")[0]
    assert "| accepts | a whole number of 32 bits, between 1 and 119 |" in own
    assert "| default | computed from the machine |" in own
    assert "| changes while the broker serves | cluster-wide |" in own
    assert "| whose | Kafka's |" in own
    own = text.partition("### max.partitions\n")[2].partition("\n### ")[0]
    assert "| whose | mpbroker's own |" in own
    of_topics = text.partition("## Of topics")[2]
    own = of_topics.partition("### retention.ms\n")[2].partition("\n### ")[0]
    assert "| default from | `log.retention.ms`, `log.retention.minutes`" in own


def test_the_reference_of_settings_has_those_of_groups_and_clients():
    text = manuals.setting_reference()
    own = text.partition("## Of a Producer")[2].partition("### linger.ms\n")[2]
    assert "| default | `5` |" in own.partition("\n### ")[0]
    assert "### group.id\n" in text.partition("## Of a Consumer\n")[2]
    assert "### share.auto.offset.reset\n" in text.partition("## Of groups\n")[2]


def test_the_reference_of_python_has_every_public_name_and_method():
    text = python.python_reference()
    heads = set(re.findall(r"^###+ (.*)$", text, re.M))
    public = {name: getattr(mpbroker, name) for name in mpbroker.__all__}
    public |= {name: getattr(extensions, name) for name in extensions.__all__}
    del public["__version__"]
    assert heads >= public.keys()
    for name, one in public.items():
        for method, found in python.public_methods(one) if inspect.isclass(one) else ():
            assert f"{name}.{method}" in heads
            assert inspect.getdoc(found), f"{name}.{method}"
    own = text.partition("#### Consumer.poll\n")[2].partition("\n#### ")[0]
    assert "Consumer.poll(timeout_ms: " in own and "- `WakeupError`: " in own
    assert "await AsyncAdminClient.create_topic(" in text


def test_what_markdown_would_take_for_html_is_escaped():
    assert manuals.escaped("a <b> *c* `<d>`") == r"a \<b\> \*c\* `<d>`"
    assert manuals._roff(".so x\\y") == "\\&.so x\\ey"
