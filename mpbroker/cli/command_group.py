"""Groups of commands that suggest the nearest name for an unknown command."""

from __future__ import annotations

from collections.abc import Collection

import click


class CommandGroup(click.Group):
    """A group of click commands that suggests the nearest name for an unknown one.

    A subclass may import a command only when it is named.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        # click itself checks an option, and completion may meet a half-typed name.
        is_name = not name.startswith("-") and not ctx.resilient_parsing
        if is_name and self.get_command(ctx, name) is None:
            near = nearest(name, self.list_commands(ctx))
            hint = f" Did you mean {near!r}?" if near else ""
            raise click.UsageError(f"No such command {name!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)


def nearest(name: str, names: Collection[str]) -> str | None:
    """Return the one of ``names`` that a mistyped name may stand for, or None."""
    from difflib import get_close_matches  # 2 ms, and only errors need it

    begun = [each for each in names if name and each.startswith(name)]
    if len(begun) == 1:
        return begun[0]
    return next(iter(get_close_matches(name, names, n=1, cutoff=0.6)), None)
