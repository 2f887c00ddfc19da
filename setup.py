"""The compiled parts, which may be missing; everything else is in pyproject.toml.

Optional: where no compiler is, or the build fails, the installation goes on without it
and the Python twin beside it is used.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "mpbroker.protocol._records",
            ["mpbroker/protocol/_records.c"],
            optional=True,
        ),
        Extension(
            "mpbroker.protocol._columns",
            ["mpbroker/protocol/_columns.c"],
            depends=["mpbroker/protocol/_varint.h"],
            optional=True,
        ),
    ]
)
