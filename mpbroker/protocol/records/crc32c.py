"""Compute CRC-32C (Castagnoli) with the package crc32c, without its slow import.

``import crc32c`` imports ``importlib.metadata`` for the package's version number, and
with it email, zipfile and socket. That takes 80 ms, and a broker should answer 250 ms
after exec. The extension module in the package needs none of these and loads in 1 ms,
so it is loaded by itself. If it is not found, the package is imported as usual.
"""

from __future__ import annotations

from importlib.machinery import ExtensionFileLoader, PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class CrcFunction(Protocol):
        def __call__(
            self, data: bytes | bytearray | memoryview, value: int = 0, /
        ) -> int: ...


def _load_extension() -> CrcFunction | None:
    package = PathFinder.find_spec("crc32c")
    if package is None or package.submodule_search_locations is None:
        return None
    spec = PathFinder.find_spec("crc32c._crc32c", package.submodule_search_locations)
    if spec is None or not isinstance(spec.loader, ExtensionFileLoader):
        return None
    module = spec.loader.create_module(spec)
    spec.loader.exec_module(module)
    function: CrcFunction = module.crc32c
    return function


def _load() -> CrcFunction:
    function = _load_extension()
    if function is not None:
        return function
    import crc32c as package

    return package.crc32c


crc32c: CrcFunction = _load()
