"""Build an image of deploy/ without an engine, as an archive that any engine loads.

    python -m deploy.image OUTPUT      as root, with debootstrap and unshare

A stage of the Dockerfile is a folder, which begins as a copy of its base; what RUN says
runs in it, in namespaces of its own. Where the Dockerfile names an image that is no
stage, a Debian with the same Python takes its place, made by debootstrap, once, below
.downloads/roots. `docker load -i OUTPUT` and `podman load -i OUTPUT` read the archive.

Source: "Dockerfile reference"; OCI image specification 1.1, image layout, layer
filesystem changeset; "docker image save", manifest.json.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any, Final

from deploy import prove, release

NAME: Final = "mpbroker"
_DEPLOY: Final = Path(__file__).resolve().parent
# Debian 13 has Python 3.13; and what python:3.13-slim has beside it.
_SUITE: Final = "trixie"
_PACKAGES: Final = "python3,python3-venv,python3-pip,python3-dev,ca-certificates"
# Source: debuerreotype, scripts/.slimify-excludes. And the static libraries of Python.
_NOT_SLIM: Final = (
    *("usr/share/doc/*", "usr/share/info/*", "usr/share/man/*", "usr/share/locale/*"),
    *("usr/share/lintian/*", "var/cache/apt/archives/*.deb", "var/lib/apt/lists/*"),
    *("usr/lib/python3*/config-*/*.a", "usr/lib/*/libpython3*.a"),
)
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Instructions whose text is kept as it stands, and the names that it is kept by.
_PLAIN: Final = {"USER": "User", "STOPSIGNAL": "StopSignal", "WORKDIR": "WorkingDir"}
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}


@dataclass
class Stage:
    """A stage of a build, the last of which is the image.

    Attributes:
        root: its file system.
        environ: what ENV has set.
        config: the rest of what engines keep of an image, in their words.
    """

    root: Path
    environ: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    config: dict[str, Any] = field(default_factory=dict)

    def copy(self, root: Path) -> Stage:
        """Return a stage that begins as this one, with a root of its own."""
        release._run(["cp", "-a", "--reflink=auto", str(self.root), str(root)])
        return Stage(root, dict(self.environ), dict(self.config))

    def image_config(self) -> dict[str, Any]:
        """Return the `config` of the image's configuration."""
        given = [f"{name}={value}" for name, value in self.environ.items()]
        return {"Env": given, **self.config}


def read_dockerfile(path: Path) -> list[tuple[str, str]]:
    """Return the instructions, each with its text; continued lines are put together."""
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    lines = [line for line in lines if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n", "", "\n".join(lines))
    parts = (line.partition(" ") for line in whole.splitlines())
    return [(name, text.strip()) for name, _, text in parts]


def build(dockerfile: Path, context: Path, base: Stage, scratch: Path) -> Stage:
    """Build what a Dockerfile describes; return its last stage.

    Args:
        context: has the files for COPY.
        base: stands for each image that FROM names and that is no stage.
        scratch: gets the stages' roots.

    Raises:
        ReleaseError: a command failed, or an instruction is unknown here.
    """
    file = dockerfile.with_name(f"{dockerfile.name}.dockerignore")
    lines = file.read_text().splitlines() if file.exists() else []
    # What begins otherwise is about names that COPY does not have.
    ignored = [each[3:] for each in lines if each.startswith("**/")]
    stages: dict[str, Stage] = {}
    stage = base
    for name, text in read_dockerfile(dockerfile):
        if name == "FROM":
            image, _, label = text.partition(" AS ")
            number = str(len(stages))
            stage = stages.get(image, base).copy(scratch / number)
            stages[label or number] = stage
        elif name == "RUN":
            _run(stage, text)
        elif name == "COPY":
            _copy(stage, text, stages, context, ignored)
        elif name != "ARG":
            _set(stage, name, text)
    return stage


def _run(stage: Stage, text: str) -> None:
    if stage.config.get("User", "root") != "root":
        raise release.ReleaseError(f"RUN as {stage.config['User']}: only root does")
    # What the files that are shared with this machine are bound to does not stay.
    bound = [stage.root / name for name in prove.SHARED]
    bound = [each for each in bound if not each.exists()]
    given = {**prove.shared_variables(), **stage.environ}
    words = ["env", "-i", *(f"{name}={value}" for name, value in given.items())]
    try:
        release._run(prove.enter(stage.root, *words, "sh", "-c", text))
    finally:
        for each in bound:
            if each.is_file():
                each.unlink()


def _copy(
    stage: Stage,
    text: str,
    stages: Mapping[str, Stage],
    context: Path,
    ignored: Sequence[str],
) -> None:
    *sources, target = shlex.split(text)
    if sources[0].startswith("--from="):
        context, ignored = stages[sources.pop(0).removeprefix("--from=")].root, ()
    ignore = shutil.ignore_patterns(*ignored)
    place = stage.root / target.lstrip("/")
    for source in sources:
        path = context / source.lstrip("/")
        if path.is_dir():  # what is in it
            shutil.copytree(
                path, place, symlinks=True, ignore=ignore, dirs_exist_ok=True
            )
        else:
            into = place / path.name if target.endswith("/") else place
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, into)


def _set(stage: Stage, name: str, text: str) -> None:
    if name == "ENV":
        pairs = [pair.partition("=") for pair in shlex.split(text)]
        before = dict(stage.environ)
        for key, _, value in pairs:
            stage.environ[key] = Template(value).safe_substitute(before)
    elif name in _PLAIN:
        stage.config[_PLAIN[name]] = text
        if name == "WORKDIR":
            (stage.root / text.lstrip("/")).mkdir(parents=True, exist_ok=True)
    elif name in ("ENTRYPOINT", "CMD"):
        stage.config[name.capitalize()] = json.loads(text)
    elif name == "VOLUME":
        more: dict[str, Any] = {each: {} for each in json.loads(text)}
        stage.config["Volumes"] = {**stage.config.get("Volumes", {}), **more}
    elif name == "EXPOSE":
        stage.config["ExposedPorts"] = {f"{each}/tcp": {} for each in text.split()}
    elif name == "HEALTHCHECK":
        stage.config["Healthcheck"] = health_check(text)
    else:
        raise release.ReleaseError(f"{name}: an instruction that is unknown here")


def health_check(text: str) -> dict[str, Any]:
    """Return what engines keep of a HEALTHCHECK; its times are in ns."""
    options, _, command = text.partition("CMD ")
    if not command:
        return {"Test": ["NONE"]}
    check: dict[str, Any] = {"Test": ["CMD", *json.loads(command)]}
    for name, value in re.findall(r"--([a-z-]+)=(\S+)", options):
        key = "".join(word.capitalize() for word in name.split("-"))
        if key == "Retries":
            check[key] = int(value)
        else:
            check[key] = int(value[:-1]) * _SECONDS[value[-1]] * 10**9
    return check


# -- the archive -----------------------------------------------------------------------


def changes(root: Path, base: Path | None = None) -> bytes:
    """Return a layer as tar: all of a root, or what differs from its base."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for folder, names, files in os.walk(root):
            names.sort()
            where = Path(folder).relative_to(root)
            for name in sorted([*names, *files]):
                path = root / where / name
                if base is None or _seen(path) != _seen(base / where / name):
                    tar.add(path, str(where / name), recursive=False)
            if base is not None and (base / where).is_dir():
                for gone in sorted({*os.listdir(base / where)} - {*names, *files}):
                    tar.addfile(tarfile.TarInfo(str(where / f".wh.{gone}")))
    return packed.getvalue()


def _seen(path: Path) -> tuple[object, ...]:
    """Return what tells whether a file is another one."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return ()
    owner = (found.st_mode, found.st_uid, found.st_gid)
    if stat.S_ISDIR(found.st_mode):
        return owner
    target = os.readlink(path) if stat.S_ISLNK(found.st_mode) else ""
    return (*owner, found.st_size, found.st_mtime_ns, target)


def write_archive(stage: Stage, base: Path, name: str, output: Path, epoch: int) -> int:
    """Write an image as an archive; return the bytes that an engine pulls of it.

    Args:
        stage: the image.
        base: the root that it began with, which becomes a layer of its own.
        name: such as mpbroker:latest.
        output: is overwritten.
        epoch: the image's time, s since 1970.
    """
    unpacked = [changes(base), changes(stage.root, base)]
    layers = [gzip.compress(each, 6, mtime=0) for each in unpacked]
    machine = {"x86_64": "amd64", "aarch64": "arm64"}
    config = {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch)),
        "architecture": machine.get(os.uname().machine, os.uname().machine),
        "os": "linux",
        "config": stage.image_config(),
        "rootfs": {
            "type": "layers",
            "diff_ids": [f"sha256:{hashlib.sha256(x).hexdigest()}" for x in unpacked],
        },
    }
    kind = "application/vnd.oci.image"
    contents: dict[str, bytes] = {}

    def blob(data: bytes, media: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        contents[f"blobs/sha256/{digest}"] = data
        sized = {"digest": f"sha256:{digest}", "size": len(data)}
        return {"mediaType": f"{kind}.{media}", **sized}

    blobs = [blob(each, "layer.v1.tar+gzip") for each in layers]
    head = {"schemaVersion": 2, "mediaType": f"{kind}.manifest.v1+json"}
    told = blob(json.dumps(config).encode(), "config.v1+json")
    manifest = blob(
        json.dumps({**head, "config": told, "layers": blobs}).encode(),
        "manifest.v1+json",
    )
    named = {
        **manifest,
        "annotations": {
            "io.containerd.image.name": f"docker.io/library/{name}",
            "org.opencontainers.image.ref.name": name.partition(":")[2],
        },
    }

    def path_of(descriptor: Mapping[str, object]) -> str:
        return "blobs/" + str(descriptor["digest"]).replace(":", "/")

    # Docker before 25 reads manifest.json, all others index.json.
    older = [
        {
            "Config": path_of(told),
            "RepoTags": [name],
            "Layers": [path_of(each) for each in blobs],
        }
    ]
    for path, document in (
        ("oci-layout", {"imageLayoutVersion": "1.0.0"}),
        ("index.json", {"schemaVersion": 2, "manifests": [named]}),
        ("manifest.json", older),
    ):
        contents[path] = json.dumps(document).encode()
    with tarfile.open(output, "w") as tar:
        for path, data in sorted(contents.items()):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mtime = len(data), epoch
            tar.addfile(entry, io.BytesIO(data))
    return sum(map(len, layers))


# -- the broker's image ----------------------------------------------------------------


def slim(root: Path) -> None:
    """Remove what neither Debian's slim images have nor python's: their sizes count."""
    for pattern in _NOT_SLIM:
        for each in root.glob(pattern):
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            else:
                each.unlink()


def make_base() -> Path:
    """Return a root that stands for python:3.13-slim; it is made if it is not there."""
    folder = prove.ROOTS / "python"
    if not folder.exists():
        half = prove.debootstrap(_SUITE, _PACKAGES, prove.ROOTS / "python.half")
        (half / "usr/bin/python").symlink_to("python3")
        slim(half)
        half.rename(folder)
    return folder


def build_broker(scratch: Path, context: Path = _DEPLOY.parent) -> Stage:
    """Build the broker's image in a folder; return it."""
    return build(_DEPLOY / "Dockerfile", context, Stage(make_base()), scratch)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the archive that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.image")
    parser.add_argument("output", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="mpbroker-image-") as scratch:
        folder = Path(scratch)
        try:
            prove.check_tools()
            sources = release.take_sources("HEAD", _made(folder / "sources"))
            stage = build_broker(_made(folder / "stages"), sources.folder)
            name = f"{NAME}:latest"
            base = make_base()
            size = write_archive(stage, base, name, options.output, sources.epoch)
        except (release.ReleaseError, subprocess.CalledProcessError) as error:
            print(f"image: {error}", file=sys.stderr)
            return 1
    print(f"{options.output}: {name}, {size / 1e6:.1f} MB packed")
    return 0


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    sys.exit(main())
