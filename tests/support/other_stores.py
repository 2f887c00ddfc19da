"""Servers of other object stores for tests, each where it has been installed.

    versitygw         a second server that speaks S3
    azurite           Microsoft's emulator of Azure Blob Storage
    fake-gcs-server   an emulator of Google Cloud Storage

Building and fetching them takes minutes, so ``scripts/test`` does not: by hand,
``python -m tests.support.other_stores`` puts them into .downloads/stores, with Go and
npm. Tests skip what is not there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from pyarrow import fs

from tests.support.children import wait_until
from tests.support.fetch_clients import ROOT
from tests.support.object_store import KEY, REGION, SECRET
from tests.support.ports import reusable_port

_PLACE: Final = ROOT / ".downloads" / "stores"
_PACKAGES: Final = {
    "versitygw": "github.com/versity/versitygw/cmd/versitygw@v1.8.0",
    "azurite-blob": "azurite@3.37.0",
    "fake-gcs-server": "github.com/fsouza/fake-gcs-server@v1.52.3",
}
# The account that every Azurite has; its key is public.
_ACCOUNT: Final = "devstoreaccount1"
_ACCOUNT_KEY: Final = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeks"
    "oGMGw=="
)
BUCKET: Final = "lake"


class Store(NamedTuple):
    """A server that runs.

    Attributes:
        scheme: of its URLs.
        endpoint: where it is.
        environ: credentials, as the environment has them.
    """

    scheme: str
    endpoint: str
    environ: Mapping[str, str]


def program(name: str) -> str | None:
    """Return the path of a server's program; None where it is not installed."""
    for folder in ("bin", "node_modules/.bin"):
        path = _PLACE / folder / name
        if path.exists():
            return str(path)
    return shutil.which(name)


@contextlib.contextmanager
def versitygw(directory: Path) -> Iterator[Store]:
    """Run a gateway that keeps objects as files, with an empty bucket."""
    (directory / "files" / BUCKET).mkdir(parents=True)
    port = reusable_port()
    address = f"127.0.0.1:{port}"
    command = ["versitygw", "--port", address, "posix", str(directory / "files")]
    environ = {"ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET}
    with _running(command, directory, port, environ):
        yield Store(
            "s3",
            f"http://{address}",
            {
                "AWS_ACCESS_KEY_ID": KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET,
                "AWS_REGION": REGION,
                "AWS_EC2_METADATA_DISABLED": "true",
            },
        )


@contextlib.contextmanager
def azurite(directory: Path) -> Iterator[Store]:
    """Run Azurite with an empty container."""
    port = reusable_port()
    command = ["azurite-blob", "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    command += ["--location", str(directory), "--skipApiVersionCheck", "--silent"]
    with _running(command, directory, port, {}):
        fs.AzureFileSystem(
            account_name=_ACCOUNT,
            account_key=_ACCOUNT_KEY,
            blob_storage_authority=f"127.0.0.1:{port}",
            blob_storage_scheme="http",
        ).create_dir(BUCKET)
        yield Store(
            "az",
            f"http://127.0.0.1:{port}/{_ACCOUNT}",
            {
                "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": _ACCOUNT_KEY,
            },
        )


@contextlib.contextmanager
def fake_gcs_server(directory: Path) -> Iterator[Store]:
    """Run fake-gcs-server with an empty bucket."""
    (directory / "files" / BUCKET).mkdir(parents=True)
    port = reusable_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = ["fake-gcs-server", "-scheme", "http", "-host", "127.0.0.1"]
    command += ["-port", str(port), "-external-url", endpoint]
    command += ["-filesystem-root", str(directory / "files")]
    with _running(command, directory, port, {}):
        yield Store("gs", endpoint, {"GOOGLE_SKIP_SIGNATURE": "true"})


@contextlib.contextmanager
def _running(
    command: list[str], directory: Path, port: int, environ: Mapping[str, str]
) -> Iterator[None]:
    path = program(command[0])
    assert path is not None
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [path, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **environ},
        )
    try:
        wait_until(lambda: process.poll() is not None or _answers(port))
        assert process.poll() is None, (directory / "log").read_text()[-3000:]
        yield
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


# By the name of a server's program, what runs it.
SERVERS: Final[Mapping[str, Callable[[Path], contextlib.AbstractContextManager[Store]]]]
SERVERS = {
    "versitygw": versitygw,
    "azurite-blob": azurite,
    "fake-gcs-server": fake_gcs_server,
}


def main() -> None:
    """Fetch and build all servers."""
    _PLACE.mkdir(parents=True, exist_ok=True)
    for name, package in _PACKAGES.items():
        if program(name):
            continue
        if package.startswith("azurite@"):
            command = ["npm", "install", "--prefix", str(_PLACE), "--no-audit", package]
        else:
            command = ["go", "install", package]
        print(" ".join(command), file=sys.stderr)
        environ = {**os.environ, "GOBIN": str(_PLACE / "bin"), "CGO_ENABLED": "0"}
        subprocess.run(command, check=True, env=environ)


if __name__ == "__main__":
    main()
