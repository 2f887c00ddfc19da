"""Load the compiled core, if it was built, fits this layout, and is not switched off.

The core is the C extension that executes the most common work. The Python code can do
all that it does, so an installation without a compiler is only slower. The choice is
made once, at import, for the whole process.
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

# If this environment variable is set and not empty, the Python twins are used instead.
PURE_PYTHON_VARIABLE: Final = "MPBROKER_PURE_PYTHON"
# The version of the core's functions; a core built from other sources has another one.
_VERSION: Final = 24


def _obstacle() -> str:
    """Return the reason why the C extension is not used; "" if it is used."""
    if os.environ.get(PURE_PYTHON_VARIABLE):
        return f"pure Python, because {PURE_PYTHON_VARIABLE} is set"
    if _core is None:
        return (
            "pure Python; install with a C compiler and Python's headers to make it"
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
        # It was built from other sources: an editable installation keeps an old core.
        return f"pure Python; the compiled core is from another build: {error}"
    return ""


_OBSTACLE: Final = _obstacle()
core: Final = None if _OBSTACLE else _core
IS_COMPILED: Final = core is not None
# The text for --version and for the log.
DESCRIPTION: Final = _OBSTACLE or "compiled core"
