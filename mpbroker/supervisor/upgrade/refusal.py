"""A program that shall take over, and cannot even read its settings."""

from mpbroker.base.logger import log_to_stderr
from mpbroker.supervisor.upgrade.takeover import TakeoverError, takeover
from mpbroker.supervisor.upgrade.upgrade import go_back


def refuse_takeover(reason: str) -> None:
    """Say to the program before us why we are no broker, and let that one go on.

    Returns if it has only tried us, or there is no way back. The settings may have
    changed since they were tried: nobody is to be disconnected by that.
    """
    log_to_stderr()
    try:
        before = takeover()
    except TakeoverError:  # which has been told
        return
    if before is None:
        return
    if before.is_trial:
        before.refuse(reason)
        return
    manifest = before.manifest
    go_back(manifest, manifest.untouched, reason)
