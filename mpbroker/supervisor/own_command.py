"""How this program was started, for whoever starts it again."""

import sys


def own_command() -> list[str]:
    """The command line, but for what belongs to that one start."""
    command, arguments = [sys.executable], iter(sys.orig_argv[1:])
    for argument in arguments:
        if argument == "--ready-fd":
            next(arguments, None)
        elif not argument.startswith("--ready-fd="):
            command.append(argument)
    return command
