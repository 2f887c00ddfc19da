"""What a process is called in ``ps``."""

from __future__ import annotations

import importlib.machinery
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec


def _setter() -> Callable[[str], None]:
    """The compiled half of setproctitle alone: the other half imports logging.

    Which a start does not need, and would pay for with a tenth of its time.
    """
    package = find_spec("setproctitle")
    if package is not None and package.submodule_search_locations:
        spec = importlib.machinery.PathFinder.find_spec(
            "setproctitle._setproctitle", list(package.submodule_search_locations)
        )
        if spec is not None and spec.loader is not None:
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            found: Callable[[str], None] | None = getattr(module, "setproctitle", None)
            if found is not None:
                return found
    from setproctitle import setproctitle

    return setproctitle


set_process_title = _setter()
