"""`serve` as click sees it: for `mpbroker --help` and shell completion only.

Of `mpbroker serve` itself only --help comes here; see `mpbroker.cli.main`.
"""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from mpbroker.cli.serve import SERVE_HELP


def complete_setting(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Offer `key=` for every broker setting that starts so."""
    from mpbroker.cli.config_command import setting_names

    return [
        CompletionItem(f"{name}=")
        for name in setting_names()
        if name.startswith(incomplete)
    ]


@click.command("serve", add_help_option=False)
@click.option("-c", "--config", type=click.Path())
@click.option("--pid-file", type=click.Path())
@click.option("--ready-fd", type=int)
@click.option("--daemon", is_flag=True)
@click.option("--enable-inject", is_flag=True)
@click.option("-h", "--help", is_flag=True)
@click.argument("settings", nargs=-1, shell_complete=complete_setting)
def command(**_: object) -> None:
    """Run a broker."""
    click.echo(SERVE_HELP, nl=False)
