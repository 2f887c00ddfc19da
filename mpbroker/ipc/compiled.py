"""The compiled core, where it was built, fits this layout, and is wanted.

It does nothing that the Python beside it does not do: whoever has no compiler loses
nothing but speed. Chosen once, at import, for the whole process.
"""

import os
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Final

from mpbroker.ipc import arena, layout

if TYPE_CHECKING:
    from mpbroker import _core

# Anything but the empty string: use the Python twins although the core is there.
PURE_PYTHON_VARIABLE: Final = "MPBROKER_PURE_PYTHON"
# Of the functions themselves; a core built from other sources has another one.
_VERSION: Final = 1


def _load() -> "tuple[ModuleType | None, str]":
    if os.environ.get(PURE_PYTHON_VARIABLE):
        return None, f"pure Python, because {PURE_PYTHON_VARIABLE} is set"
    try:
        from mpbroker import _core
    except ImportError:
        return None, "pure Python; a C compiler at installation makes it faster"
    try:
        if _core.VERSION != _VERSION:
            raise ValueError(f"version {_core.VERSION}, not {_VERSION}")
        places = {"layout": layout, "arena": arena}
        values = []
        for name in _core.layout_names():
            module, _, attribute = name.partition(".")
            values.append(int(attrgetter(attribute)(places[module])))
        _core.configure(tuple(values))
    except (AttributeError, ValueError) as error:
        # Left from another version of the sources: an editable install keeps it.
        return None, f"pure Python; the compiled core is of another build: {error}"
    return _core, "compiled"


_core_or_none, DESCRIPTION = _load()
core: "Final" = _core_or_none
IS_COMPILED: Final = core is not None
