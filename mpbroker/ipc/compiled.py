"""The compiled core, where it was built, fits this layout, and is wanted.

It does nothing that the Python beside it does not do: whoever has no compiler loses
nothing but speed. Chosen once, at import, for the whole process.
"""

import os
from operator import attrgetter
from typing import Final

from mpbroker.ipc import arena, layout, quota_layout
from mpbroker.ipc.counters import fetched_bytes

try:
    from mpbroker.native import _core
except ImportError:  # no compiler where this was installed
    _core = None  # type: ignore[assignment]

# Anything but the empty string: use the Python twins although the core is there.
PURE_PYTHON_VARIABLE: Final = "MPBROKER_PURE_PYTHON"
# Of the functions themselves; a core built from other sources has another one.
_VERSION: Final = 20


def _obstacle() -> str:
    """Why the compiled core is not used; empty if it is."""
    if os.environ.get(PURE_PYTHON_VARIABLE):
        return f"pure Python, because {PURE_PYTHON_VARIABLE} is set"
    if _core is None:
        return (
            "pure Python; a C compiler and Python's headers, at installation, make it"
            " faster"
        )
    try:
        if _core.VERSION != _VERSION:
            raise ValueError(f"version {_core.VERSION}, not {_VERSION}")
        places = {
            "layout": layout,
            "arena": arena,
            "quota_layout": quota_layout,
            "fetched_bytes": fetched_bytes,
        }
        values = []
        for name in _core.layout_names():
            module, _, attribute = name.partition(".")
            values.append(int(attrgetter(attribute)(places[module])))
        _core.configure(tuple(values))
    except (AttributeError, ValueError) as error:
        # Left over from other sources: an editable installation keeps it.
        return f"pure Python; the compiled core is of another build: {error}"
    return ""


_OBSTACLE: Final = _obstacle()
core: Final = None if _OBSTACLE else _core
IS_COMPILED: Final = core is not None
# For people: --version and the log.
DESCRIPTION: Final = _OBSTACLE or "compiled core"
