"""The compiled parts, which may be missing; everything else is in pyproject.toml.

Optional: where no compiler is, or the build fails, the installation goes on without it
and the Python twin beside it is used.
"""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "mpbroker.native._records",
            ["mpbroker/native/protocol/_records.c"],
            include_dirs=["mpbroker/native"],
            depends=["mpbroker/native/protocol/varint.h"],
            optional=True,
        ),
        Extension(
            "mpbroker.native._columns",
            ["mpbroker/native/protocol/_columns.c"],
            include_dirs=["mpbroker/native"],
            depends=["mpbroker/native/protocol/varint.h"],
            optional=True,
        ),
        Extension(
            "mpbroker._core",
            sorted(glob("mpbroker/native/*.c")),
            depends=sorted(glob("mpbroker/native/*.h")),
            # What the sources share stays theirs.
            extra_compile_args=["-std=c11", "-D_GNU_SOURCE", "-fvisibility=hidden"],
            optional=True,
        ),
    ]
)
