"""import-linter knows each package: a new one cannot be left out of the floors."""

import itertools
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


def packages() -> Iterator[str]:
    for init in ROOT.glob("mpbroker/*/**/__init__.py"):
        yield ".".join(init.parent.relative_to(ROOT).parts)


def layered() -> Iterator[str]:
    """Yield what the layers of all contracts name."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for contract in pyproject["tool"]["importlinter"]["contracts"]:
        if contract["type"] != "layers":
            continue
        names = [name for layer in contract["layers"] for name in layer.split(" | ")]
        containers = contract.get("containers", [""])
        for container, name in itertools.product(containers, names):
            yield f"{container}.{name}".strip(".")


def test_each_package_is_in_a_layer() -> None:
    assert set(packages()) - set(layered()) == set()


def test_no_two_files_of_the_core_call_each_other() -> None:
    """A file that defines a type names the functions of its methods, in any file."""
    native = ROOT / "mpbroker" / "native"
    texts = {
        str(path.relative_to(native).with_suffix(".h")): path.read_text()
        for path in native.rglob("*.c")
    }
    found = [
        (one, other)
        for one, other in itertools.combinations(sorted(texts), 2)
        if f'#include "{other}"' in texts[one]
        and f'#include "{one}"' in texts[other]
        and "\nPyTypeObject " not in texts[one] + texts[other]
    ]
    assert found == []
