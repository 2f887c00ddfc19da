"""Refuse to run where the other distribution that is imported as mpbroker is installed.

The package index has a media player broker called "mpbroker"; this distribution is
called "mpbroker-server". Their files have the same names, so the one that is installed
later overwrites a part of the other.
"""

from __future__ import annotations

import os
from typing import Final

from mpbroker.base.errors import MpbrokerError

DISTRIBUTION: Final = "mpbroker-server"


class WrongDistributionError(MpbrokerError):
    """Another distribution has written into this package."""


def refuse_other_distribution(folder: str | None = None) -> None:
    """Raise an error if the other distribution is installed beside this package.

    This reads one directory, in 20 to 120 microseconds; `importlib.metadata` takes
    30 ms.

    Args:
        folder: the directory of installed packages; None: the one of this package.

    Raises:
        WrongDistributionError: the media player broker is installed there.
    """
    if folder is None:
        folder = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    try:
        names = os.listdir(folder)
    except OSError:  # a package in a zip file, say
        return
    for name in names:
        if name.startswith("mpbroker-") and name.endswith(".dist-info"):
            raise WrongDistributionError(
                f"{os.path.join(folder, name)}: another program called mpbroker, a"
                f" media player broker, is installed beside {DISTRIBUTION}; their files"
                " have the same names, so they exclude each other: pip uninstall"
                f" mpbroker {DISTRIBUTION}, then pip install {DISTRIBUTION}"
            )
