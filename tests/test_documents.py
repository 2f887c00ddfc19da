"""What the documents name is there: links, files, tests, commands."""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from pathlib import Path

import click
import pytest

from mpbroker.cli.root import root
from mpbroker.cli.serve import parse_serve_arguments
from mpbroker.client.code_settings import CONSUMER_CODE, PRODUCER_CODE
from mpbroker.client.consumer.consumer_config import CONSUMER_CONFIG
from mpbroker.client.share.share_consumer_config import SHARE_CONSUMER_CONFIG
from mpbroker.config import BROKER_CONFIG_DEF
from mpbroker.metadata.log_config_def import LOG_CONFIG_DEF
from mpbroker.producer.config import PRODUCER_CONFIG
from mpbroker.server.configs.group_config_def import GROUP_CONFIG_DEF

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("README", "ARCHITECTURE", "CONTRIBUTING", "SECURITY")
TOP = [ROOT / f"{name}.md" for name in NAMES]
FOR_USERS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_PACKAGES = sorted((ROOT / "mpbroker").rglob("README.md"))
OF_TESTS = [ROOT / "tests/bench/README.md"]
DOCUMENTS = list(
    dict.fromkeys([*TOP, ROOT / "CHANGELOG.md", *FOR_USERS, *OF_PACKAGES, *OF_TESTS])
)
FILE = re.compile(r"`((?:[\w.]+/)*[\w.@]+\.(?:py|c|h|md|toml|html|properties|yaml))`")
# Written by users, or by the broker, and so not here.
NOT_OURS = {"flights.toml", "pyvenv.cfg", "server.properties"}
TESTS = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py")]
SOURCES = [
    path.relative_to(ROOT)
    for pattern in ("mpbroker/**/*.py", "mpbroker/**/*.[ch]", "*.py", "deploy/*")
    for path in ROOT.glob(pattern)
]


def each_document(documents=DOCUMENTS):
    return pytest.mark.parametrize(
        "document", documents, ids=lambda each: str(each.relative_to(ROOT))
    )


def ends_with(path: Path, name: str) -> bool:
    parts = Path(name).parts
    return path.parts[-len(parts) :] == parts


def anchors(text: str) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in heads}


@each_document()
def test_every_link_leads_somewhere(document):
    text = document.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


@each_document()
def test_headings_of_a_document_differ(document):
    heads = re.findall(r"^## (.*)$", document.read_text(), re.M)
    assert len(heads) == len(set(heads))


@each_document([*TOP, *FOR_USERS[1:], *OF_PACKAGES, *OF_TESTS])
def test_every_file_and_test_that_is_named_exists(document):
    text = document.read_text()
    for name in FILE.findall(text):
        if Path(name).name not in NOT_OURS:
            there = (ROOT / name).exists() or (ROOT / "mpbroker" / name).exists()
            assert there or any(ends_with(each, name) for each in SOURCES), name
    for name in re.findall(r"`(test_\w+|tests/[\w/]+)`", text):
        there = (ROOT / name).exists()
        assert there or any(ends_with(each, f"{name}.py") for each in TESTS), name


PACKAGES = sorted(path.parent for path in (ROOT / "mpbroker").rglob("__init__.py"))


@each_document(OF_PACKAGES)
def test_every_room_of_a_package_is_told_and_no_table_lists_many_files(document):
    text = document.read_text()
    for package in PACKAGES:
        if package.parent == document.parent:
            assert f"{package.name}/" in text, package.name
    for table in re.findall(r"^\| file .*\n(?:\|.*\n)+", text, re.M):
        assert table.count("\n") <= 2 + 15


@pytest.mark.parametrize("package", PACKAGES, ids=lambda each: each.name)
def test_every_module_begins_by_saying_what_it_holds(package):
    for path in package.glob("*.py"):
        told = ast.get_docstring(ast.parse(path.read_text()))
        assert told, path.relative_to(ROOT)


def test_no_folder_is_longer_than_a_screen():
    for folder in {path.parent for path in (ROOT / "mpbroker").rglob("*.py")}:
        if folder.name not in ("messages", "handlers"):
            files = [each for each in folder.iterdir() if each.is_file()]
            written = [each for each in files if each.suffix != ".so"]
            assert len(written) <= 24, folder.relative_to(ROOT)


def test_a_base_name_that_stands_twice_stands_for_one_idea():
    allowed = {
        "__init__.py",
        "errors.py",  # what a package raises
        "acl.py",  # the words of access control; the command about them
        "metadata.py",  # the API; what a client knows by it
        "options.py",  # of commands; of Spark's source
        "telemetry.py",  # of KIP-714: what all clients do; what producers add
        "transactions.py",  # the broker's side; the producer's side
    }
    names = Counter(
        path.name
        for path in (ROOT / "mpbroker").rglob("*.py")
        if path.parent.name != "messages"
    )
    assert {name for name, count in names.items() if count > 1} <= allowed


def test_every_file_in_c_has_its_twin_named():
    text = (ROOT / "mpbroker/native/README.md").read_text()
    table = text[text.index("| C | Python twin |") :]
    for path in (ROOT / "mpbroker/native").glob("*/*.c"):
        # What base/ holds is C's own business: Python has it, or needs it not.
        assert path.parent.name == "base" or f"`{path.name}`" in table, path.name


def commands_in(text: str) -> list[list[str]]:
    """Return the arguments of every `mpbroker` in a block of shell commands."""
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S))
    found = []
    for line in blocks.replace("\\\n", " ").splitlines():
        for words in pipeline_of(line):
            while words and "=" in words[0]:  # variables of the environment
                del words[0]
            if words and Path(words[0]).name == "mpbroker":
                found.append(words[1:])
    return found


def pipeline_of(line: str) -> list[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|<>")
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if word == "|":
            commands.append([])
        elif word in (">", "2>", "<"):
            next(lexer, None)  # a file, and no argument
        else:
            commands[-1].append(word)
    return commands


@each_document([*TOP, *FOR_USERS[1:]])
def test_every_command_that_is_shown_is_one(document):
    for words in commands_in(document.read_text()):
        check_command(words)


def check_command(words: list[str]) -> None:
    """Have click read a command line, options and all, and execute nothing."""
    if words[0] == "serve":
        parse_serve_arguments(words[1:])
        return
    # A page makes its files of settings itself.
    words = [
        "/dev/null" if before == "-F" else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    name, command, rest = "mpbroker", root, words
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        name, *rest = rest
        found = command.get_command(click.Context(command), name)
        assert found is not None, words
        command = found
    if "--help" not in rest and not isinstance(command, click.Group):
        command.make_context(name, rest)


def test_a_command_line_with_an_option_that_is_not_there_would_be_seen():
    with pytest.raises(click.NoSuchOption):
        check_command(["topic", "create", "t", "--partition-count", "8"])
    with pytest.raises(AssertionError):
        check_command(["topic", "make", "t"])


SETTING = re.compile(r"`([a-z]+(?:\.[a-z0-9]+)+)(?:=[^`]*)?`")
DEFINITIONS = [
    BROKER_CONFIG_DEF,
    LOG_CONFIG_DEF,
    GROUP_CONFIG_DEF,
    PRODUCER_CONFIG,
    CONSUMER_CONFIG,
    SHARE_CONSUMER_CONFIG,
]
NO_SETTINGS = {"client.id", *PRODUCER_CODE, *CONSUMER_CODE}
# A metric of ours; options of Spark, which tests/spark/test_option_table.py checks.
NO_SETTINGS_BEGIN = ("mpbroker.", "kafka.", "spark.")


@each_document(FOR_USERS)
def test_every_setting_that_is_named_is_one(document):
    text = document.read_text()
    named = set(SETTING.findall(text))
    for block in re.findall(r"^```properties\n(.*?)^```", text, re.M | re.S):
        named |= {line.partition("=")[0] for line in block.splitlines()}
    for name in named - NO_SETTINGS:
        if FILE.fullmatch(f"`{name}`") or name.startswith(NO_SETTINGS_BEGIN):
            continue
        if name.startswith("config.providers."):  # behind it comes any name
            continue
        known = any(name in definition for definition in DEFINITIONS)
        assert known or BROKER_CONFIG_DEF.of_listener(name), name


def test_every_script_that_is_named_is_one():
    for document in DOCUMENTS:
        for name in re.findall(r"\bscripts/([a-z-]+)", document.read_text()):
            assert (ROOT / "scripts" / name).exists(), (document, name)
