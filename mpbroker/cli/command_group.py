"""Groups of commands that say what an unknown command or option may mean."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import click


class CommandGroup(click.Group):
    """A group of click commands that says what an unknown name or option may mean.

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
            meant = self._in_groups(ctx, name) or ([near] if near else [])
            hint = f" Did you mean {' or '.join(map(repr, meant))}?" if meant else ""
            raise click.UsageError(f"No such command {name!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            # Most tools take an option at either place; here it is the command's.
            for _, command in self._commands(ctx):
                if any(error.option_name in each.opts for each in command.params):
                    raise click.UsageError(
                        f"{error.message} It comes after the command:"
                        f" {ctx.command_path} COMMAND {error.option_name}",
                        ctx,
                    ) from error
            raise

    def _commands(self, ctx: click.Context) -> Iterator[tuple[str, click.Command]]:
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None:
                yield name, command

    def _in_groups(self, ctx: click.Context, name: str) -> list[str]:
        """Return the commands of the groups in this one that have this very name."""
        return [
            f"{group_name} {name}"
            for group_name, group in self._commands(ctx)
            if isinstance(group, click.Group) and name in group.list_commands(ctx)
        ]


def nearest(name: str, names: Collection[str]) -> str | None:
    """Return the one of ``names`` that a mistyped name may stand for, or None."""
    from difflib import get_close_matches  # 2 ms, and only errors need it

    begun = [each for each in names if name and each.startswith(name)]
    if len(begun) == 1:
        return begun[0]
    return next(iter(get_close_matches(name, names, n=1, cutoff=0.6)), None)
