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
