"""`mpbroker completion SHELL`: print the script that lets a shell complete commands."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import get_completion_class

_HELP = """\
Print a shell completion script.

\b
  bash   mpbroker completion bash > ~/.local/share/bash-completion/completions/mpbroker
  zsh    mpbroker completion zsh > ~/.zfunc/_mpbroker   (with ~/.zfunc in fpath)
  fish   mpbroker completion fish > ~/.config/fish/completions/mpbroker.fish
"""


# Replacements in click's scripts, by shell. After KEY= comes a value and no blank, and
# descriptions may have commas.
_BETTER: Final = {
    "bash": (
        "    return 0\n",
        "    [[ ${#COMPREPLY[@]} != 1 || $COMPREPLY != *= ]] || compopt -o nospace\n"
        "    return 0\n",
    ),
    "zsh": (
        "        compadd -U -V unsorted -a completions\n",
        "        local -a suffix=()\n"
        "        [[ $#completions != 1 || $completions[1] != *= ]] || suffix=(-S '')\n"
        '        compadd "${suffix[@]}" -U -V unsorted -a completions\n',
    ),
    "fish": ('string split ","', 'string split --max 1 ","'),
}


@click.command("completion", help=_HELP)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    completer_class = get_completion_class(shell)
    assert completer_class is not None
    root = ctx.find_root().command
    completer = completer_class(root, {}, "mpbroker", "_MPBROKER_COMPLETE")
    # The template and not source(), which runs the shell to find out its version.
    script = completer.source_template % completer.source_vars()
    click.echo(script.replace(*_BETTER[shell]))
