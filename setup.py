"""The compiled modules, which may be missing; everything else is in pyproject.toml.

Optional: where no compiler is, or the build fails, the installation goes on without it
and the Python twin beside it is used.
"""

from glob import glob

from setuptools import Extension, setup

ROOT = "mpbroker/native"


def extension(name: str, *sources: str) -> Extension:
    return Extension(
        f"mpbroker.native.{name}",
        list(sources),
        include_dirs=[ROOT],
        depends=sorted(glob(f"{ROOT}/*/*.h")),
        # What the sources share stays theirs.
        extra_compile_args=["-std=c11", "-D_GNU_SOURCE", "-fvisibility=hidden"],
        optional=True,
    )


setup(
    ext_modules=[
        extension("_records", f"{ROOT}/protocol/_records.c"),
        extension("_columns", f"{ROOT}/protocol/_columns.c"),
        # A file with an underscore is a module's own; all others are the core's.
        extension("_core", f"{ROOT}/_core.c", *sorted(glob(f"{ROOT}/*/[!_]*.c"))),
    ]
)
