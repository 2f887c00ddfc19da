"""`serve` as a click command, for `mpbroker --help` and shell completion.

`mpbroker serve` itself comes here for --help only: see `mpbroker.cli.main`.
"""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from mpbroker.cli.serve import OPTIONS, ServeOption, serve_help


def complete_setting(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Offer `key=` for each broker setting that begins with the text so far."""
    from mpbroker.cli.config_command import setting_names

    return [
        CompletionItem(f"{name}=")
        for name in setting_names()
        if name.startswith(incomplete)
    ]


def _option(option: ServeOption) -> click.Option:
    kind = click.Path() if option.value == "FILE" else str
    return click.Option(option.names, type=kind, is_flag=option.value is None)


def _help(**_: object) -> None:
    click.echo(serve_help(), nl=False)


command = click.Command(
    "serve",
    callback=_help,
    params=[
        *map(_option, OPTIONS),
        click.Argument(["settings"], nargs=-1, shell_complete=complete_setting),
    ],
    help="Run a broker.",
    add_help_option=False,
)
