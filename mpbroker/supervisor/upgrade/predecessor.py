"""Predecessor: the program that this one replaces in an upgrade, and the way back.

Both programs run in the supervisor's process, one after the other (see upgrade.py).
Until the new program has proved itself it can become the old one again, by a manifest
(the list of all that one program hands to the next). What the old one would then find
depends on how far the new one has come:

    the last step that is done           the way back
    none                                 the manifest as it came: nothing has changed
    its generation has ended             the same, and its sockets with its keeper
    this broker is composed, and shares  this broker's manifest: all children, those of
    its memory                           the old program and ours
    connections are ours, in memory of   a leaver ends our children and describes the
    another layout                       connections, as it was done to get here
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from mpbroker import __version__
from mpbroker.base.errors import MpbrokerError
from mpbroker.base.logger import get_logger, log_to_stderr
from mpbroker.supervisor.upgrade.manifest import Manifest, TakeoverError
from mpbroker.supervisor.upgrade.replacement import UpgradeError, replace_program
from mpbroker.supervisor.upgrade.takeover import takeover

if TYPE_CHECKING:
    from mpbroker.storage.log_directory import LogDirectory
    from mpbroker.supervisor.memory import BrokerMemory
    from mpbroker.supervisor.upgrade.next_generation import Left
    from mpbroker.supervisor.upgrade.parent import Parent
    from mpbroker.supervisor.upgrade.running_broker import RunningBroker

_LOG = get_logger(__name__)

# Describes the broker for the old program. The arguments are the command that starts
# this program (empty: there is no second way back), and why this program gives up.
Describe = Callable[[list[str], str], Manifest]


class Predecessor:
    """The program that this one replaces in an upgrade, and the way back to it.

    Attributes:
        manifest: lists all that the old program has left to this one.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._way_back: Describe = manifest.untouched
        self._left: Left | None = None
        self._forget_sockets: Callable[[], None] = lambda: None

    # -- taking over, step by step -----------------------------------------------------

    def end_generation(
        self, directories: Sequence[LogDirectory], memory: BrokerMemory
    ) -> None:
        """End the old program's children: until our own serve, clients wait.

        Args:
            directories: our log directories; they are told in which state the old
                children have left the logs.
            memory: our memory, in another layout; it inherits some values of the old.

        Raises:
            TakeoverError: the children could not be ended; the old program can go on.
        """
        # Imported before the children end: from then on clients wait.
        from mpbroker.supervisor.upgrade.next_generation import (
            give_back,
            take_over_from,
        )

        self._left = left = take_over_from(self.manifest)
        self._way_back = partial(give_back, self.manifest, left)
        for directory in directories:
            directory.know_logs(left.logs)
        # Only now: while a child of theirs lived, it could still change these.
        memory.inherit_from(self.manifest.parts)

    def meet(self, broker: RunningBroker) -> None:
        """Take this broker's parts, which the way back to the old program needs."""
        if not self.manifest.is_generation:
            self._way_back = broker.manifest

    def begin_generation(self, broker: RunningBroker) -> None:
        """Take over the connections that the old program's children have left.

        Raises:
            TakeoverError: that is impossible; the old program can still go on.
        """
        if self._left is None:
            return  # the memory is shared, and so are the children
        from mpbroker.supervisor.upgrade.next_generation import NextGeneration, bury

        supervisor, memory = broker.supervisor, broker.memory
        generation = NextGeneration(supervisor, memory)
        generation.begin(self._left)
        # Up to here the old keeper lives and has every socket, so give_back() works.
        # bury() kills it and closes the old segments: from then on only our own
        # generation can be handed over, and the way back is another one.
        bury(self.manifest, memory.parts.fds)
        supervisor.sockets_kept = generation.sockets
        self._forget_sockets = generation.forget_sockets
        self._way_back = partial(broker.manifest_of_generation, by_force=True)

    def renew(self, supervisor: Parent) -> None:
        """Begin to replace the old program's children, and to prove the new ones.

        If they fail, this program becomes the old one again.
        """
        before, failed = self.manifest, self.manifest.going_back

        def ended(reason: str) -> None:
            if reason:
                self.go_back(reason)
            if failed:
                supervisor.say_of_upgrade(f"failed, and was undone: {failed}")
            elif reason:
                supervisor.say_of_upgrade(f"failed, and there is no way back: {reason}")
            else:
                _LOG.info("upgrade: done, %s to %s", before.version, __version__)
                supervisor.say_of_upgrade(f"done: {before.version} to {__version__}")
            self._forget_sockets()

        supervisor.renew_all(ended, are_ours=before.is_generation)

    # -- the way back ------------------------------------------------------------------

    def go_back(self, reason: str | Exception) -> None:
        """Become the old program again; return if that is impossible."""
        manifest = self.manifest
        if isinstance(reason, Exception):
            # An error that is not ours says little without its class.
            is_ours = isinstance(reason, MpbrokerError)
            reason = str(reason) if is_ours else repr(reason)
        if manifest.going_back:
            _LOG.critical("upgrade: the old version does not work any more: %s", reason)
            return
        _LOG.error("upgrade: going back to %s: %s", manifest.version, reason)
        try:
            replace_program(manifest.command, self._way_back([], reason))
        except UpgradeError as error:
            _LOG.critical("upgrade: there is no way back: %s", error)


def refuse_takeover(reason: str) -> None:
    """Return to the old program, because this one cannot even read its settings.

    The settings may have changed since they were tried; no client is disconnected by
    that. The call returns if this program was only being tried, or if it replaces none,
    or if there is no way back.

    Args:
        reason: the error in the settings, for the log and the status.
    """
    log_to_stderr()
    try:
        before = takeover()
    except TakeoverError:  # it has been reported
        return
    if before is None:
        return
    if before.is_trial:
        before.refuse(reason)
    else:
        Predecessor(before.manifest).go_back(reason)
