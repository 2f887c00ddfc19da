"""Make a release: sdist, wheels with the compiled core, SBOM and hashes, all checked.

What `scripts/release` runs. All is built from a commit, in a temporary directory, and
all times in it are the commit's: so a second run gives equal bytes, which is checked.

zig (ziglang, a compiler on the package index) compiles the C for an old glibc and for
another processor, on any machine and without a container. The wheels are written here
and not by setuptools, whose names and tags are those of the Python that runs it.

Source: PEP 427 and PEP 770 (wheels, and SBOMs in them), PEP 643 (sdists), PEP 600
(manylinux), CycloneDX 1.6.
"""

from __future__ import annotations

import argparse
import base64
import csv
import gzip
import hashlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
VERSION_FILE: Final = "mpbroker/__init__.py"
CHANGELOG: Final = "CHANGELOG.md"
PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
CORE: Final = ("_core", "_records", "_columns", "_cleaner")
# As CPython builds extensions; and no path of this machine in the result.
FLAGS: Final = ("-O3", "-DNDEBUG", "-fwrapv", "-fPIC", "-shared", "-s", "-w")
NOT_SHIPPED: Final = ("tests/", ".ci/", ".gitignore")


class ReleaseError(Exception):
    """The release cannot be made; the text says why."""


@dataclass(frozen=True)
class Platform:
    """A kind of machine that has wheels of its own.

    Attributes:
        tag: the wheels' platform tag, several names with a dot between them.
        target: what zig calls it.
        triplet: the end of the names of extension modules.
        elf_machine: e_machine of ELF files.
    """

    tag: str
    target: str
    triplet: str
    elf_machine: int


# glibc 2.17 is that of manylinux2014. No musl: the mutexes in shared memory are glibc's
# (native/ipc/mutex.c), and google-re2 has no wheels for it.
PLATFORMS: Final = (
    Platform(
        "manylinux_2_17_x86_64.manylinux2014_x86_64",
        "x86_64-linux-gnu.2.17",
        "x86_64-linux-gnu",
        62,
    ),
    Platform(
        "manylinux_2_17_aarch64.manylinux2014_aarch64",
        "aarch64-linux-gnu.2.17",
        "aarch64-linux-gnu",
        183,
    ),
)


# -- the sources -----------------------------------------------------------------------


@dataclass(frozen=True)
class Sources:
    """The files of a commit.

    Attributes:
        folder: has them, those that are not shipped, too.
        names: of those that are shipped.
        epoch: the commit's time, s since 1970.
    """

    folder: Path
    names: tuple[str, ...]
    epoch: int


def take_sources(commit: str, folder: Path, root: Path = ROOT) -> Sources:
    """Write the files of a commit into a folder."""
    commit = _git(root, "rev-parse", commit).decode().strip()  # HEAD may move on
    packed = _git(root, "archive", "--format=tar", commit)
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        tar.extractall(folder, filter="data")
    listed = _git(root, "ls-tree", "-r", "--name-only", "-z", commit).decode()
    names = [name for name in listed.split("\0") if name]
    shipped = [name for name in names if not name.startswith(NOT_SHIPPED)]
    epoch = int(_git(root, "show", "-s", "--format=%ct", commit))
    for name in names:
        os.utime(folder / name, (epoch, epoch))
    sources = Sources(folder, tuple(sorted(shipped)), epoch)
    readme = folder / "README.md"
    readme.write_text(without_relative_links(readme.read_text(), home_of(sources)))
    return sources


def _git(root: Path, *arguments: str) -> bytes:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True
    ).stdout


def home_of(sources: Sources) -> str:
    """Return the address below which files of the version are; "": there is none."""
    project = tomllib.loads((sources.folder / "pyproject.toml").read_text())["project"]
    home = project.get("urls", {}).get("Source", "")
    return f"{home}/blob/v{version_of(sources.folder)}/" if home else ""


def without_relative_links(text: str, home: str) -> str:
    """Return a README whose links lead somewhere on the package index's page, too.

    Args:
        home: is put before relative links; "": their text stays, and the link goes.
    """
    relative = re.compile(r"\[([^\]]+)\]\((?!https?://)([^)\s]+)\)")
    return relative.sub(rf"[\1]({home}\2)" if home else r"\1", text)


def version_of(folder: Path) -> str:
    """Return the version that a folder with sources has."""
    found = re.search(
        r'^__version__: Final = "(.*)"$', (folder / VERSION_FILE).read_text(), re.M
    )
    if found is None:
        raise ReleaseError(f"{VERSION_FILE} has no __version__")
    return found[1]


# -- sdist -----------------------------------------------------------------------------


def write_sdist(sources: Sources, metadata: bytes, output: Path) -> Path:
    """Write all shipped files and PKG-INFO as a tar.gz whose bytes never differ."""
    base = f"mpbroker_server-{version_of(sources.folder)}"
    contents = {name: (sources.folder / name).read_bytes() for name in sources.names}
    contents["PKG-INFO"] = metadata
    unpacked = io.BytesIO()
    with tarfile.open(fileobj=unpacked, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(contents):
            entry = tarfile.TarInfo(f"{base}/{name}")
            entry.size = len(contents[name])
            entry.mtime = sources.epoch
            path = sources.folder / name
            runs = path.exists() and os.access(path, os.X_OK)
            entry.mode = 0o755 if runs else 0o644
            tar.addfile(entry, io.BytesIO(contents[name]))
    path = output / f"{base}.tar.gz"
    # Its header has a time, and the time is the commit's.
    path.write_bytes(gzip.compress(unpacked.getvalue(), mtime=sources.epoch))
    return path


def check_sdist(path: Path, sources: Sources) -> None:
    """Raise ReleaseError unless an sdist has all that it should, and no tests."""
    with tarfile.open(path) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    needed = {*sources.names, "PKG-INFO", "pyproject.toml", "setup.py", "LICENSE"}
    needed |= {CHANGELOG, "ARCHITECTURE.md", "deploy/install.sh", "mpbroker/py.typed"}
    if missing := needed - names:
        raise ReleaseError(f"{path.name} lacks {', '.join(sorted(missing))}")
    if more := {name for name in names if name.startswith(NOT_SHIPPED)}:
        raise ReleaseError(f"{path.name} has {', '.join(sorted(more))}")


# -- wheels ----------------------------------------------------------------------------


def pure_wheel(sources: Sources) -> dict[str, bytes]:
    """Return the files of a wheel without the core, as setuptools makes it, by name."""
    with tempfile.TemporaryDirectory() as scratch:
        build = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
        done = subprocess.run(
            [sys.executable, "-c", build, scratch],
            cwd=sources.folder,
            env={**os.environ, "MPBROKER_CORE": "no"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ReleaseError(f"no wheel could be built:\n{done.stderr[-2000:]}")
        (path,) = Path(scratch).glob("*.whl")
        return read_wheel(path)


def read_wheel(path: Path) -> dict[str, bytes]:
    """Return the files of a wheel by name."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def file_in_dist_info(files: Mapping[str, bytes], name: str) -> str:
    """Return the path of a file of the metadata, such as METADATA."""
    (found,) = (
        each for each in files if re.fullmatch(rf"[^/]+\.dist-info/{name}", each)
    )
    return found


def compile_core(
    sources: Sources, include: Path, platform: Platform, compiler: Sequence[str]
) -> dict[str, bytes]:
    """Compile the modules in C; return them by the last part of their names."""
    build = runpy.run_path(str(sources.folder / "setup.py"), run_name="release")
    found = {}
    for extension in build["extensions"](sources.folder):
        name = extension.name.rpartition(".")[2]
        with tempfile.TemporaryDirectory() as scratch:
            target = Path(scratch) / "module.so"
            command = [*compiler, *extension.extra_compile_args, *FLAGS]
            command += [f"-I{each}" for each in (*extension.include_dirs, include)]
            command += [*extension.sources, "-o", str(target)]
            done = subprocess.run(
                command, cwd=sources.folder, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise ReleaseError(
                    f"{name} for {platform.target} does not compile:\n{done.stderr}"
                )
            found[name] = target.read_bytes()
    return found


def zig(platform: Platform) -> list[str]:
    """Return zig's command that compiles C for a platform."""
    return [sys.executable, "-m", "ziglang", "cc", "-target", platform.target]


def write_wheel(
    pure: Mapping[str, bytes],
    core: Mapping[str, bytes],
    python: str,
    platform: Platform,
    epoch: int,
    output: Path,
) -> Path:
    """Write a wheel for one Python and platform, whose bytes never differ.

    Args:
        pure: the files of a wheel without the core, by name.
        core: the compiled modules by name.
        python: its version, such as 3.12.
    """
    cpython = "cp" + python.replace(".", "")
    files = dict(pure)
    suffix = f"cpython-{cpython[2:]}-{platform.triplet}.so"
    for name, module in core.items():
        files[f"mpbroker/native/{name}.{suffix}"] = module
    about = file_in_dist_info(files, "WHEEL")
    kept = [
        line
        for line in files[about].decode().splitlines()
        if line and not line.startswith(("Tag:", "Root-Is-Purelib:"))
    ]
    tags = [f"{cpython}-{cpython}-{tag}" for tag in platform.tag.split(".")]
    lines = [*kept, "Root-Is-Purelib: false", *(f"Tag: {tag}" for tag in tags)]
    files[about] = "".join(f"{line}\n" for line in lines).encode()
    record = file_in_dist_info(files, "RECORD")
    files[record] = _record(files, record)
    base = record.partition(".dist-info/")[0]
    path = output / f"{base}-{cpython}-{cpython}-{platform.tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        # The metadata last, as PEP 427 recommends.
        for name in sorted(files, key=lambda name: (".dist-info/" in name, name)):
            entry = zipfile.ZipInfo(name, time.gmtime(epoch)[:6])
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix, for the mode
            mode = 0o755 if name.endswith(".so") else 0o644
            entry.external_attr = (0o100000 | mode) << 16
            archive.writestr(entry, files[name])
    return path


def _record(files: Mapping[str, bytes], own: str) -> bytes:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for name in sorted(files):
        if name == own:
            rows.writerow([name, "", ""])
            continue
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest())
        rows.writerow([name, f"sha256={digest.decode().rstrip('=')}", len(files[name])])
    return text.getvalue().encode()


def check_wheel(path: Path) -> None:
    """Raise ReleaseError unless a wheel has the core for its Python and platform.

    And unless it has what users need beside it, and nothing of the tests or the C.
    """
    _, _, cpython, _, tag = path.name.removesuffix(".whl").split("-")
    (platform,) = (each for each in PLATFORMS if each.tag == tag)
    files = read_wheel(path)
    suffix = f"cpython-{cpython[2:]}-{platform.triplet}.so"
    for name in CORE:
        module = files.get(f"mpbroker/native/{name}.{suffix}")
        if module is None:
            raise ReleaseError(f"{path.name} has no compiled {name}")
        # Source: elf(5), e_machine.
        if module[:4] != b"\x7fELF" or module[18] != platform.elf_machine:
            raise ReleaseError(f"{path.name}: {name} is for another machine")
        if str(ROOT).encode() in module:
            raise ReleaseError(f"{path.name}: {name} has a path of this machine")
    others = [name for name in files if name.endswith(".so") and suffix not in name]
    strays = [name for name in files if name.startswith("tests") or name[-2:] == ".c"]
    if others or strays:
        raise ReleaseError(f"{path.name} has {', '.join(others + strays)}")
    for name in ("mpbroker/py.typed", "mpbroker/exporter/page.html"):
        if name not in files:
            raise ReleaseError(f"{path.name} lacks {name}")


def audit(path: Path) -> None:
    """Raise ReleaseError unless auditwheel finds a wheel to be what its tag says."""
    done = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    told = re.search(r'platform tag:\s+"(\S+)"', " ".join(done.stdout.split()))
    tags = path.name.removesuffix(".whl").rpartition("-")[2].split(".")
    if done.returncode or told is None or told[1] not in (*tags, _older(tags[0])):
        raise ReleaseError(
            f"auditwheel finds {path.name} to be {told[1] if told else 'nothing'}:"
            f" {done.stderr}"
        )


def _older(tag: str) -> str:
    """Return the tag of an even older glibc, which is as good."""
    return tag.replace("manylinux_2_17", "manylinux_2_5")


# -- what goes with them ---------------------------------------------------------------


def bill_of_materials(project: Mapping[str, object], version: str, epoch: int) -> bytes:
    """Return the SBOM: what the distribution is, and what it depends on."""

    def component(requirement: str) -> dict[str, object]:
        name = re.split(r"[\[<>=!~; ]", requirement)[0]
        return {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name.lower().replace('_', '-')}",
            "name": name,
            "purl": f"pkg:pypi/{name.lower().replace('_', '-')}",
            "properties": [{"name": "requirement", "value": requirement}],
        }

    dependencies = project["dependencies"]
    assert isinstance(dependencies, list)
    components = [component(each) for each in sorted(dependencies)]
    own = f"pkg:pypi/{project['name']}@{version}"
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch))
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": stamp,
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": project["name"],
                "version": version,
                "purl": own,
                "licenses": [{"license": {"id": project["license"]}}],
            },
        },
        "components": components,
        "dependencies": [
            {"ref": own, "dependsOn": [each["bom-ref"] for each in components]}
        ],
    }
    return (json.dumps(document, indent=2) + "\n").encode()


def hashes(paths: Iterable[Path]) -> str:
    """Return the lines that `sha256sum --check` reads."""
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(paths)
    )


# -- a whole release -------------------------------------------------------------------


def build(
    sources: Sources,
    includes: Mapping[str, Path],
    output: Path,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Build and check the sdist and all wheels; return them.

    Args:
        includes: by version of Python, the folder with its Python.h.
    """
    output.mkdir(parents=True, exist_ok=True)
    project = tomllib.loads((sources.folder / "pyproject.toml").read_text())["project"]
    version = version_of(sources.folder)
    sbom = bill_of_materials(project, version, sources.epoch)
    pure = pure_wheel(sources)
    metadata = file_in_dist_info(pure, "METADATA")
    folder = metadata.partition("/")[0]
    pure[f"{folder}/sboms/{project['name']}.cdx.json"] = sbom
    made = [write_sdist(sources, pure[metadata], output)]
    check_sdist(made[0], sources)
    say(made[0].name)
    for platform in PLATFORMS:
        for python, include in includes.items():
            core = compile_core(sources, include, platform, zig(platform))
            wheel = write_wheel(pure, core, python, platform, sources.epoch, output)
            check_wheel(wheel)
            audit(wheel)
            say(wheel.name)
            made.append(wheel)
    beside = output / f"mpbroker_server-{version}.cdx.json"
    beside.write_bytes(sbom)
    (output / "SHA256SUMS").write_text(hashes([*made, beside]))
    return made


def try_wheel(wheel: Path, python: str, say: Callable[[str], None] = print) -> None:
    """Install a wheel into a fresh environment; produce and consume with it.

    Raises:
        ReleaseError: something of that fails, or the core is not used.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _run([python, "-m", "venv", str(folder / "venv")])
        programs = folder / "venv/bin"
        _run([str(programs / "pip"), "install", "--quiet", str(wheel)])
        produce_and_consume(str(programs / "mpbroker"), folder)
    say(f"{wheel.name}: a record came back")


def produce_and_consume(command: str, folder: Path) -> None:
    """Start a broker, write a record and read it back.

    Raises:
        ReleaseError: one of the commands fails, or the broker does not use the core.
    """
    data, pid_file = folder / "data", folder / "pid"
    serve = [command, "serve", "--daemon", "--pid-file", str(pid_file)]
    _run([*serve, "listeners=PLAINTEXT://127.0.0.1:0", f"log.dirs={data}"])
    try:
        log = (data / "mpbroker.log").read_text()
        if "request path: compiled core" not in log:
            raise ReleaseError(f"the broker does not use the core:\n{log}")
        port = re.search(r"serving PLAINTEXT on 127\.0\.0\.1:(\d+)", log)
        assert port is not None, log
        where = ["-b", f"127.0.0.1:{port[1]}", "-t", "greetings"]
        _run([command, "produce", *where], "hello\n")
        told = _run([command, "consume", *where, "-e"])
        if told != "hello\n":
            raise ReleaseError(f"consumed {told!r}")
    finally:
        _run([command, "ctl", "stop", "--data-dir", str(data)])


def _run(command: Sequence[str], given: str = "") -> str:
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise ReleaseError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return done.stdout


def pythons(named: Sequence[str], wanted: Sequence[str]) -> dict[str, tuple[str, Path]]:
    """Return, by version, a Python with its headers.

    Args:
        named: interpreters; others are looked for on PATH.
        wanted: versions.

    Raises:
        ReleaseError: there is none of a wanted version.
    """
    look = "import sys, sysconfig as s; print('%d.%d' % sys.version_info[:2],"
    look += " s.get_path('include'))"
    found: dict[str, tuple[str, Path]] = {}
    for name in [*named, *(f"python{version}" for version in wanted)]:
        path = shutil.which(name)
        if path is None:
            continue
        done = subprocess.run([path, "-c", look], capture_output=True, text=True)
        version, _, include = done.stdout.strip().partition(" ")
        if version in wanted and (Path(include) / "Python.h").exists():
            found.setdefault(version, (path, Path(include)))
    if missing := [version for version in wanted if version not in found]:
        raise ReleaseError(
            f"no Python {', '.join(missing)} with its headers: name one with --python,"
            " or do without by --only"
        )
    return {version: found[version] for version in wanted}


def version_of_headers(folder: Path) -> str:
    """Return the version of Python that a folder with Python.h is of, such as 3.14."""
    try:
        text = (folder / "patchlevel.h").read_text()
    except OSError as error:
        raise ReleaseError(f"{folder} has no headers of Python: {error}") from error
    numbers = dict(re.findall(r"^#define PY_(M\w+)_VERSION\s+(\d+)", text, re.M))
    return f"{numbers['MAJOR']}.{numbers['MINOR']}"


def name_version(folder: Path, version: str, day: str) -> None:
    """Write a version into the sources, and its heading into the changelog."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise ReleaseError(f"{version!r} is not a version such as 1.2.3 or 1.2.3rc1")
    module = folder / VERSION_FILE
    old = f'__version__: Final = "{version_of(folder)}"'
    module.write_text(
        module.read_text().replace(old, f'__version__: Final = "{version}"')
    )
    changelog = folder / CHANGELOG
    text = changelog.read_text()
    heading = "## [Unreleased]\n"
    if text.count(heading) != 1 or f"## [{version}]" in text:
        raise ReleaseError(f"{CHANGELOG} has no [Unreleased], or has [{version}]")
    body = text.partition(heading)[2].partition("\n## [")[0]
    if "- " not in body:
        raise ReleaseError(f"{CHANGELOG} has nothing below [Unreleased]")
    changelog.write_text(text.replace(heading, f"{heading}\n## [{version}] - {day}\n"))


def commit_release(version: str, scratch: Path, root: Path = ROOT) -> str:
    """Commit a version's heading and number, on no branch yet; return the commit."""
    if _git(root, "status", "--porcelain"):
        raise ReleaseError("the checkout has changes that are not committed")
    if _git(root, "tag", "--list", f"v{version}"):
        raise ReleaseError(f"there is a tag v{version}")
    tree = scratch / "tree"
    _git(root, "worktree", "add", "--quiet", "--detach", str(tree), "HEAD")
    try:
        name_version(tree, version, time.strftime("%Y-%m-%d", time.gmtime()))
        _git(tree, "commit", "--quiet", "--all", "-m", f"release: {version}")
        return _git(tree, "rev-parse", "HEAD").decode().strip()
    finally:
        _git(root, "worktree", "remove", "--force", str(tree))


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the release that the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/release")
    parser.add_argument("version", nargs="?")
    parser.add_argument("--try", action="store_true", dest="only_try")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", action="append", default=[])
    parser.add_argument("--headers", action="append", default=[], type=Path)
    parser.add_argument("--only", default=",".join(PYTHONS), metavar="3.11,3.12")
    options = parser.parse_args(arguments)
    if (options.version is None) != options.only_try:
        parser.error("give either a VERSION or --try")
    try:
        _release(options)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def _release(options: argparse.Namespace) -> None:
    includes = {version_of_headers(each): each for each in options.headers}
    wanted = options.only.split(",")
    found = pythons(options.python, [each for each in wanted if each not in includes])
    includes |= {version: include for version, (_, include) in found.items()}
    with tempfile.TemporaryDirectory(prefix="mpbroker-release-") as scratch:
        commit = "HEAD"
        if not options.only_try:
            commit = commit_release(options.version, Path(scratch))
        made = {}
        for number in ("first", "second"):
            folder = Path(scratch) / number
            folder.mkdir()
            sources = take_sources(commit, folder)
            output = options.output if number == "first" else Path(scratch) / "again"
            made[number] = build(sources, includes, output)
        for first, second in zip(made["first"], made["second"], strict=True):
            if first.read_bytes() != second.read_bytes():
                raise ReleaseError(f"{first.name}: a second run gave other bytes")
    for version, (python, _) in found.items():
        for wheel in made["first"]:
            cpython = f"-cp{version.replace('.', '')}-"
            if cpython in wheel.name and os.uname().machine in wheel.name:
                try_wheel(wheel, python)
    if not options.only_try:
        _git(ROOT, "merge", "--quiet", "--ff-only", commit)
        _git(ROOT, "tag", "-a", f"v{options.version}", "-m", options.version, commit)
        print(f"committed and tagged v{options.version}; to publish is left to you")


if __name__ == "__main__":
    sys.exit(main())
