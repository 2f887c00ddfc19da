"""The one compiled part, which may be missing; everything else is in pyproject.toml.

Optional: where no compiler is, or the build fails, the installation goes on without it
and `mpbroker.protocol.record_walk` uses its Python twin.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "mpbroker.protocol._records",
            ["mpbroker/protocol/_records.c"],
            optional=True,
        )
    ]
)
