"""The compiled modules, which may be missing; everything else is in pyproject.toml.

Optional: where no compiler is, or the build fails, the installation goes on without it
and the Python twin beside it is used. MPBROKER_CORE=required makes a failure an error,
for what is published; MPBROKER_CORE=no builds none.
"""

import os
from glob import glob
from pathlib import Path

from setuptools import Extension, setup

ROOT = "mpbroker/native"
CORE = os.environ.get("MPBROKER_CORE", "optional")


def extension(name: str, *sources: str) -> Extension:
    return Extension(
        f"mpbroker.native.{name}",
        list(sources),
        include_dirs=[ROOT],
        depends=sorted(glob(f"{ROOT}/*/*.h")),
        # What the sources share stays theirs.
        extra_compile_args=["-std=c11", "-D_GNU_SOURCE", "-fvisibility=hidden"],
        optional=CORE != "required",
    )


def extensions(folder: Path) -> list[Extension]:
    """Return the compiled modules; their paths are relative to the folder."""
    # A file with an underscore is a module's own; all others are the core's.
    shared = sorted(glob(f"{ROOT}/*/[!_]*.c", root_dir=folder))
    return [
        extension("_records", f"{ROOT}/protocol/_records.c"),
        extension("_columns", f"{ROOT}/protocol/_columns.c"),
        extension(
            "_cleaner", f"{ROOT}/storage/_cleaner.c", f"{ROOT}/protocol/crc32c.c"
        ),
        extension("_core", f"{ROOT}/_core.c", *shared),
    ]


if __name__ == "__main__":
    setup(ext_modules=[] if CORE == "no" else extensions(Path()))
