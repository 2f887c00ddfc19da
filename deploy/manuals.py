"""Write the command line's man pages, and the references of commands and settings.

    python -m deploy.manuals FOLDER [YYYY-MM-DD]    # mpbroker.1, mpbroker-topic.1, ...

All of it is made of what the commands and the table of settings say of themselves, so
nothing of it can differ from them. The site (deploy/site.py) has the references.

Source: man-pages(7), groff_man(7).
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Final

import click

from mpbroker import __version__
from mpbroker.base.config_def import ConfigDef, ConfigKey
from mpbroker.cli.exit_codes import EXIT_CODE_HELP
from mpbroker.cli.root import COMMANDS, root
from mpbroker.cli.serve import OPTIONS, serve_help
from mpbroker.client.consumer.consumer_config import CONSUMER_CONFIG
from mpbroker.client.settings import ADMIN_CONFIG
from mpbroker.client.share.share_consumer_config import SHARE_CONSUMER_CONFIG
from mpbroker.config import BROKER_CONFIG_DEF, explain
from mpbroker.config.explanation import Explanation, explain_topic_key
from mpbroker.metadata.log_config_def import LOG_CONFIG_DEF
from mpbroker.producer.config import PRODUCER_CONFIG
from mpbroker.server.configs.group_config_def import GROUP_CONFIG_DEF

# By heading; those of the broker and of topics are told with more facts.
OTHER_SETTINGS: Final[dict[str, ConfigDef]] = {
    "Of groups": GROUP_CONFIG_DEF,
    "Of a Producer": PRODUCER_CONFIG,
    "Of a Consumer": CONSUMER_CONFIG,
    "Of a ShareConsumer": SHARE_CONSUMER_CONFIG,
    "Of an AdminClient": ADMIN_CONFIG,
}
_VERBATIM: Final = "\b"  # click's mark of a paragraph whose lines are kept


@dataclass(frozen=True)
class Manual:
    """What a command says of itself.

    Attributes:
        words: name it, such as mpbroker, topic, create.
        usage: the arguments behind the words.
        summary: one line.
        paragraphs: of the description; True: its lines are kept as they are.
        options: spellings and meaning.
        commands: of a group.
    """

    words: tuple[str, ...]
    usage: str
    summary: str
    paragraphs: tuple[tuple[bool, str], ...]
    options: tuple[tuple[str, str], ...]
    commands: tuple[Manual, ...]

    @property
    def name(self) -> str:
        return " ".join(self.words)


def manual() -> Manual:
    """Return what mpbroker and all its commands say."""
    context = click.Context(root, info_name="mpbroker", **root.context_settings)
    return _manual(context, ("mpbroker",))


def _manual(context: click.Context, words: Sequence[str]) -> Manual:
    if tuple(words) == ("mpbroker", "serve"):
        return _serve()
    command = context.command
    records = [
        record
        for param in command.get_params(context)
        if isinstance(param, click.Option)
        and (record := param.get_help_record(context)) is not None
    ]
    commands = []
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None, name
            below = click.Context(found, context, info_name=name)
            commands.append(_manual(below, (*words, name)))
    return Manual(
        tuple(words),
        " ".join(command.collect_usage_pieces(context)),
        command.get_short_help_str(200).rstrip("."),
        tuple(_paragraphs(command.help or "")),
        tuple(records),
        tuple(commands),
    )


def _serve() -> Manual:
    """Return what `serve` says, which reads its command line without click."""
    text = serve_help().partition("\n\nOptions:")[0].partition("\n\n")[2]
    options = [
        (", ".join(each.names) + (f" {each.value}" if each.value else ""), each.help)
        for each in OPTIONS
    ]
    return Manual(
        ("mpbroker", "serve"),
        "[OPTIONS] [KEY=VALUE]...",
        COMMANDS["serve"][1].rstrip("."),
        tuple(_paragraphs(text)),
        tuple(options),
        (),
    )


def _paragraphs(text: str) -> Iterator[tuple[bool, str]]:
    for block in re.split(r"\n[ \t]*\n", cleandoc(text)):
        lines = block.strip("\n").splitlines()
        marked = bool(lines) and lines[0].strip() == _VERBATIM
        kept = marked or all(line.startswith("  ") for line in lines)
        if marked:
            del lines[0]
        if lines:
            shown = [line.removeprefix("  ") for line in lines] if kept else lines
            yield kept, "\n".join(shown) if kept else " ".join(shown)


# -- man pages -------------------------------------------------------------------------


def man_page(page: Manual, day: str) -> str:
    """Return the man page of a command, with the commands below it."""
    title = "-".join(page.words)
    lines = [
        f'.TH {_roff(title.upper())} 1 "{day}" "mpbroker {__version__}"',
        ".SH NAME",
        f"{_roff(title)} \\- {_roff(page.summary)}",
        ".SH SYNOPSIS",
        *(_synopsis(each) for each in (page.commands or (page,))),
        ".SH DESCRIPTION",
        *_description(page),
    ]
    if page.options:
        lines += [".SH OPTIONS", *_options(page)]
    if page.commands:
        lines.append(".SH COMMANDS")
    for each in page.commands:
        if len(page.words) == 1:  # those have pages of their own
            own = _roff("-".join(each.words))
            lines += [".TP", rf"\fB{own}\fR(1)", _roff(each.summary)]
            continue
        lines += [f'.SS "{_roff(each.name)} {_roff(each.usage)}"']
        lines += [*_description(each), *_options(each)]
    lines += [".SH EXIT STATUS", ".nf"]
    lines += [_roff(line) for line in EXIT_CODE_HELP.splitlines()[1:]]
    lines += [".fi", ".SH SEE ALSO"]
    others = [name for name in ("mpbroker", *_own_pages()) if name != title]
    lines.append(", ".join(rf"\fB{_roff(name)}\fR(1)" for name in others))
    return "\n".join(line for line in lines if line) + "\n"


def _own_pages() -> list[str]:
    return [f"mpbroker-{name}" for name in sorted(COMMANDS)]


def _synopsis(page: Manual) -> str:
    return rf"\fB{_roff(page.name)}\fR {_roff(page.usage)}" + "\n.br"


def _description(page: Manual) -> Iterator[str]:
    for kept, text in page.paragraphs:
        if kept:
            yield from (".PP", ".RS 4", ".nf", *map(_roff, text.splitlines()))
            yield from (".fi", ".RE")
        else:
            yield from (".PP", _roff(text))


def _options(page: Manual) -> Iterator[str]:
    for spelling, meaning in page.options:
        yield from (".TP", rf"\fB{_roff(spelling)}\fR", _roff(meaning))


def _roff(text: str) -> str:
    r"""Return text that roff shows as it is: \ and - and a dot or quote in front."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def write_man_pages(folder: Path, day: str) -> list[Path]:
    """Write a page for mpbroker and one for each of its commands; return them."""
    folder.mkdir(parents=True, exist_ok=True)
    top = manual()
    made = []
    for page in (top, *top.commands):
        made.append(folder / ("-".join(page.words) + ".1"))
        made[-1].write_text(man_page(page, day))
    return made


# -- references, in Markdown -----------------------------------------------------------


def command_reference() -> str:
    """Return all commands with their options."""
    top = manual()
    lines = ["# Commands", "", "Made from what `mpbroker --help` says.", ""]
    lines += ["```text", EXIT_CODE_HELP.rstrip(), "```", ""]
    for page in top.commands:
        lines += _markdown(page, 2)
    return "\n".join(lines)


def _markdown(page: Manual, level: int) -> Iterator[str]:
    yield from (f"{'#' * level} {page.name}", "")
    if not page.commands:
        yield from ("```text", f"{page.name} {page.usage}", "```", "")
    for kept, text in page.paragraphs:
        yield from ("```sh", text, "```", "") if kept else (escaped(text), "")
    if page.options:
        yield from ("| option | meaning |", "| --- | --- |")
        for spelling, meaning in page.options:
            told = _cell(meaning)
            yield f"| `{spelling.replace('|', chr(92) + '|')}` | {told} |"
        yield ""
    for each in page.commands:
        yield from _markdown(each, level + 1)


def setting_reference() -> str:
    """Return all settings, of brokers, topics, groups and clients, with their facts."""
    lines = ["# Settings", ""]
    lines += [
        "Made from the table that the broker reads its settings by. `mpbroker config"
        " explain KEY` tells the same, with the value on the machine at hand.",
        "",
    ]
    for title, definition, tell in (
        ("Of the broker", BROKER_CONFIG_DEF, explain),
        ("Of topics", LOG_CONFIG_DEF, explain_topic_key),
    ):
        lines += [f"## {title}", ""]
        for name in sorted(key.name for key in definition):
            lines += _setting(tell(name))
    for title, definition in OTHER_SETTINGS.items():
        lines += [f"## {title}", ""]
        for key in sorted(definition, key=lambda key: key.name):
            lines += _other_setting(key)
    return "\n".join(lines)


def _other_setting(key: ConfigKey) -> Iterator[str]:
    yield from (f"### {key.name}", "", escaped(key.documentation), "")
    default = key.format(key.default)
    facts = [
        ("type", key.type.name.lower()),
        ("accepts", key.limit),
        ("default", _default(None if default is None else key.shown(default))),
    ]
    yield from _table(facts)


def _setting(each: Explanation) -> Iterator[str]:
    yield from (f"### {each.name}", "", escaped(each.documentation), "")
    default = _default(each.default)
    if each.is_computed:
        default = "computed from the machine"
    facts = [
        ("type", each.type),
        ("accepts", each.limit),
        ("default", default),
        ("changes while the broker serves", each.update_mode),
        ("whose", "mpbroker's own" if each.is_ours else "Kafka's"),
        ("importance", each.importance),
        ("since", each.since),
        ("if not set", ", then ".join(f"`{name}`" for name in each.instead)),
        ("also", ", ".join(f"`{name}`" for name in each.aliases)),
        (
            "default from" if each.scope == "topic" else "topic setting",
            ", ".join(f"`{name}`" for name in each.related),
        ),
    ]
    yield from _table(facts)


def _default(text: str | None) -> str:
    return "none" if text is None else f"`{text}`" if text else "empty"


def _table(facts: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield from ("| | |", "| --- | --- |")
    yield from (f"| {name} | {_cell(text)} |" for name, text in facts if text)
    yield ""


def escaped(text: str) -> str:
    """Return text without what Markdown would take for HTML or emphasis."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(
        piece if piece.startswith("`") else re.sub(r"([<>*_\[\]])", r"\\\1", piece)
        for piece in pieces
    )


def _cell(text: str) -> str:
    return escaped(" ".join(text.split())).replace("|", "\\|")


if __name__ == "__main__":
    where, *given = sys.argv[1:]
    today = time.strftime("%Y-%m-%d", time.gmtime())
    write_man_pages(Path(where), given[0] if given else today)
