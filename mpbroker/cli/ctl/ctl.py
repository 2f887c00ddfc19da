"""`mpbroker ctl`: watch and change a running broker, through its control socket."""

from __future__ import annotations

from importlib import import_module
from typing import Final

import click

from mpbroker.cli.command_group import CommandGroup
from mpbroker.cli.exit_codes import EXIT_CODE_HELP

# command -> (module, name of the click command there, one line for --help).
_COMMANDS: Final[dict[str, tuple[str, str, str]]] = {
    "status": ("ctl_status", "status", "Show the state of the broker."),
    "top": ("ctl_top", "top", "Watch the load of processes, APIs and clients."),
    "connections": ("ctl_connections", "connections", "List client connections."),
    "blackbox": ("ctl_blackbox", "blackbox", "Show the last events of dead processes."),
    "doctor": ("ctl_doctor", "doctor", "Check what the broker depends on."),
    "resize": ("ctl_actions", "resize", "Change the number of processes."),
    "restart": ("ctl_actions", "restart", "Replace one process by a new one."),
    "upgrade": ("ctl_actions", "upgrade", "Replace the whole broker in place."),
    "reload": ("ctl_actions", "reload", "Read the configuration file again."),
    "drain": ("ctl_actions", "drain", "Accept no new connections, then stop."),
    "stop": ("ctl_actions", "stop", "Stop the broker."),
    "inject": ("ctl_actions", "inject", "Cause a fault, for tests."),
}


class _Commands(CommandGroup):
    """A group that imports a command's module when the command is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, name, _ = _COMMANDS[cmd_name]
        command = getattr(import_module(f"mpbroker.cli.ctl.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, text) for name, (_, _, text) in _COMMANDS.items()]
            )


@click.group("ctl", cls=_Commands, epilog="\b\n" + EXIT_CODE_HELP)
def command() -> None:
    """Watch and change a running broker.

    --data-dir or --socket names the broker; neither is needed if only one runs. If the
    supervisor does not answer, `status`, `top --once`, `connections` and `blackbox`
    show what the broker has published.
    """
