"""What the documents name is there: links, files, tests, commands."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import click
import pytest

from mpbroker.cli.root import root

ROOT = Path(__file__).resolve().parents[1]
TOP = [ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING")]
OF_PACKAGES = sorted((ROOT / "mpbroker").glob("*/README.md"))
DOCUMENTS = [*TOP, ROOT / "CHANGELOG.md", *OF_PACKAGES]
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


@each_document([*TOP, *OF_PACKAGES])
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
    text = (ROOT / "mpbroker/ipc/README.md").read_text()
    table = text[text.index("| C | twin |") :]
    for path in (ROOT / "mpbroker/native").glob("*/*.c"):
        # What base/ holds is C's own business: Python has it, or needs it not.
        assert path.parent.name == "base" or f"`{path.name}`" in table, path.name


def commands_in(text: str) -> set[tuple[str, ...]]:
    """Every `mpbroker COMMAND [SUBCOMMAND]` within a block of shell commands."""
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S))
    found = re.findall(
        r"(?:^|\s)(?:\.venv/bin/)?mpbroker ([a-z]+)(?: ([a-z]+))?", blocks
    )
    return {tuple(filter(None, each)) for each in found}


@each_document(TOP)
def test_every_command_that_is_shown_is_one(document):
    for words in commands_in(document.read_text()):
        command = root.get_command(click.Context(root), words[0])
        assert command is not None, words
        if isinstance(command, click.Group) and len(words) > 1:
            assert command.get_command(click.Context(command), words[1]), words


def test_every_script_that_is_named_is_one():
    for document in DOCUMENTS:
        for name in re.findall(r"\bscripts/([a-z-]+)", document.read_text()):
            assert (ROOT / "scripts" / name).exists(), (document, name)
