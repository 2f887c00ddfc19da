"""What the documents name is there: links, files, tests, commands."""

from __future__ import annotations

import re
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


TABLE = "\n| file | holds |\n"
WITH_TABLES = [each for each in OF_PACKAGES if TABLE in each.read_text()]


@each_document(WITH_TABLES)
def test_every_module_of_a_package_is_where_its_files_are_told(document):
    before, _, rest = document.read_text().partition(TABLE)
    text = before + rest.partition("\n## ")[0]
    named = {name for name in FILE.findall(text) if "/" not in name}
    modules = {each.name for each in document.parent.glob("*.py")}
    assert modules - named <= {"__init__.py", "errors.py"}
    packages = {f"{each.parent.name}/" for each in document.parent.glob("*/*.py")}
    assert packages <= set(re.findall(r"`(\w+/)`", text))


def test_every_file_in_c_has_its_twin_named():
    text = (ROOT / "mpbroker/ipc/README.md").read_text()
    table = text[text.index("| C | twin |") :]
    of_the_module = {"module.c"}  # how all of it is a module
    for path in (ROOT / "mpbroker/native").glob("*.c"):
        assert path.name in of_the_module or f"`{path.name}`" in table, path.name


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
