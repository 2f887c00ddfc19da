"""A real object store for tests: SeaweedFS's S3 server on loopback."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyarrow import fs

from tests.support.ports import reusable_port

KEY, SECRET, REGION = "lake", "lake-secret", "us-east-1"
PATIENCE_S = 120
_PROBE = "lake/probe"
_TABLES = "tables"


@dataclass
class ObjectStore:
    """A server that runs, or has been killed.

    Attributes:
        environ: the variables by which any client finds it.
        catalog: the properties of its Iceberg REST catalog, whose tables are below
            ``s3://tables/default``.
        shell: the command that takes its administrator's lines.
    """

    command: list[str]
    log: Path
    endpoint: str
    environ: dict[str, str]
    catalog: dict[str, str]
    shell: list[str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it answers."""
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        deadline = time.monotonic() + PATIENCE_S
        while not self._answers():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.1)

    def _answers(self) -> bool:
        """Write an object once and read it: the gateway answers before its volumes."""
        files = self.files()
        try:
            files.create_dir("lake")
            if files.get_file_info(_PROBE).type == fs.FileType.NotFound:
                with files.open_output_stream(_PROBE) as stream:
                    stream.write(b"there")
            with files.open_input_stream(_PROBE) as stream:
                return bool(stream.read() == b"there")
        except OSError:
            return False

    def files(self) -> fs.S3FileSystem:
        """Return the store for a test's own look at it; it may create buckets."""
        return fs.S3FileSystem(
            endpoint_override=self.endpoint,
            access_key=KEY,
            secret_key=SECRET,
            region=REGION,
            allow_bucket_creation=True,
        )

    def create_table_bucket(self) -> None:
        """Create the bucket of the REST catalog's tables."""
        line = f"s3tables.bucket -create -name {_TABLES} -account {KEY}\n"
        done = subprocess.run(
            self.shell, input=line, capture_output=True, text=True, check=True
        )
        assert "ARN" in done.stdout, done.stdout + done.stderr

    def kill(self) -> None:
        """Kill the server, as a power cut does."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()


def server() -> str | None:
    """Return SeaweedFS's program; None where it is not installed."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@contextlib.contextmanager
def object_store(directory: Path) -> Iterator[ObjectStore]:
    """Run a store with an empty bucket, ``lake``.

    Args:
        directory: for its files; it must exist.
    """
    program = server()
    assert program is not None
    config = directory / "s3.json"
    credentials = [{"accessKey": KEY, "secretKey": SECRET}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    config.write_text(
        json.dumps(
            {
                "identities": [
                    {"name": KEY, "credentials": credentials, "actions": actions}
                ]
            }
        )
    )
    (directory / "files").mkdir()
    ports = iter({reusable_port() for _ in range(30)})
    s3, iceberg, master, filer = (next(ports) for _ in range(4))
    master_grpc, filer_grpc = next(ports), next(ports)
    options = {
        "dir": directory / "files",
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.port": master,
        "master.port.grpc": master_grpc,
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 64,
        "volume.port": next(ports),
        "volume.port.grpc": next(ports),
        "volume.max": 0,
        "filer.port": filer,
        "filer.port.grpc": filer_grpc,
        "filer.localSocket": directory / "filer.sock",
        "s3.port": s3,
        "s3.port.grpc": next(ports),
        "s3.port.iceberg": iceberg,
        "s3.port.lance": 0,
        "s3.config": config,
        "s3.localSocket": directory / "s3.sock",
    }
    endpoint = f"http://127.0.0.1:{s3}"
    store = ObjectStore(
        [program, "server", "-s3", *(f"-{k}={v}" for k, v in options.items())],
        directory / "log",
        endpoint,
        {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        },
        {
            "uri": f"http://127.0.0.1:{iceberg}",
            "warehouse": f"s3://{_TABLES}",
            "credential": f"{KEY}:{SECRET}",
            "oauth2-server-uri": f"http://127.0.0.1:{iceberg}/v1/oauth/tokens",
        },
        [
            *(program, "shell", f"-master=127.0.0.1:{master}.{master_grpc}"),
            f"-filer=127.0.0.1:{filer}.{filer_grpc}",
        ],
    )
    store.start()
    try:
        yield store
    finally:
        store.kill()
