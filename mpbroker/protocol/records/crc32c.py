"""CRC-32C (Castagnoli) over any buffer, without the price of its package's import.

``import crc32c`` runs ``importlib.metadata`` to learn its own version number, which
pulls in email, zipfile and socket: 80 ms of a broker that shall answer 250 ms after
exec. The extension module inside needs none of that and loads in 1 ms, so it is loaded
by itself; wherever it is not found under its name, the package is imported as usual.
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
