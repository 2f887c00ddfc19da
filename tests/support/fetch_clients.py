"""Fetch what tests use and no Python package brings: other clients, tools, checkers.

Run by scripts/test before the tests, so that no test waits for a download. Whatever
cannot be had is said in one line and left out: its tests are then counted as skipped.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
JAVA_DIR: Final = ROOT / ".downloads" / "java"
_JAVA_SOURCES: Final = ROOT / "tests" / "compat" / "java"
_POM: Final = _JAVA_SOURCES / "pom.xml"
_JAVA_CLIENTS: Final = (
    _JAVA_SOURCES / "TransactionalClient.java",
    _JAVA_SOURCES / "StreamsApplication.java",
)
# Kafkas whose directories are taken over, beside the one that the pom names.
OLDER_KAFKAS: Final = ("3.9.2", "4.0.1")
SPARK_DIR: Final = ROOT / ".downloads" / "spark"
_SPARK_SOURCES: Final = ROOT / "tests" / "compat" / "spark"
_SPARK_POM: Final = _SPARK_SOURCES / "pom.xml"
_OLDER_SPARK_POM: Final = _SPARK_SOURCES / "older.xml"
FRANZ_GO: Final = ROOT / ".downloads" / "franz-go" / "franz"
_GO_SOURCES: Final = ROOT / "tests" / "compat" / "go"
NODE_DIR: Final = ROOT / ".downloads" / "node"
PROMETHEUS_DIR: Final = ROOT / ".downloads" / "prometheus"
_NODE_SOURCES: Final = ROOT / "tests" / "compat" / "node"

# A command, and the Debian package that has it.
_DEBIAN: Final = (
    ("kcat", "kcat"),
    ("systemd-analyze", "systemd"),  # judges the units
    ("shellcheck", "shellcheck"),
)

# Two cores and 54 MB of jars took 30 s; a mirror may be slow, but not for ever.
_MAVEN_TIMEOUT_S: Final = 400
_APT_TIMEOUT_S: Final = 180
_JAVAC_TIMEOUT_S: Final = 180
_GO_TIMEOUT_S: Final = 400
_NPM_TIMEOUT_S: Final = 120


def have_java_tools() -> bool:
    """Return whether the jars that the pom names are there, and a Java to run them."""
    stamp = JAVA_DIR / "pom.xml"
    return (
        shutil.which("java") is not None
        and stamp.is_file()
        and stamp.read_bytes() == _POM.read_bytes()
    )


def have_spark_connector() -> bool:
    """Return whether the jars of Spark's own Kafka connector are there."""
    stamp = SPARK_DIR / "pom.xml"
    poms = (_SPARK_POM, _OLDER_SPARK_POM)
    return stamp.is_file() and stamp.read_bytes() in [
        each.read_bytes() for each in poms
    ]


def fetch_java_tools() -> str:
    """Copy the jars to .downloads/java; return why not, or an empty text."""
    if have_java_tools():
        return ""
    return _fetch_jars("Apache Kafka's tools (54 MB)", _POM, JAVA_DIR)


def older_kafka_dir(version: str) -> Path:
    """Return where the jars of an older Kafka are, if they are anywhere."""
    return JAVA_DIR.with_name(f"kafka-{version}")


def have_older_kafka(version: str) -> bool:
    """Return whether the jars of an older Kafka are there, and a Java to run them."""
    stamp = older_kafka_dir(version) / "pom.xml"
    return (
        shutil.which("java") is not None
        and stamp.is_file()
        and stamp.read_text() == _older_pom(version)
    )


def _older_pom(version: str) -> str:
    """Return the pom with another version, and without what only tools need."""
    text = re.sub("(?<=<kafka.version>)[^<]*", version, _POM.read_text())
    for name in ("kafka-tools", "kafka-streams"):
        begin = rf"<dependency>\s*<groupId>[^<]*</groupId>\s*<artifactId>{name}<.*?"
        text = re.sub(begin + "</dependency>", "", text, flags=re.DOTALL)
    return text


def fetch_older_kafka(version: str) -> str:
    """Copy the jars to .downloads/kafka-VERSION; return why not, or an empty text."""
    if have_older_kafka(version):
        return ""
    with tempfile.TemporaryDirectory() as scratch:
        pom = Path(scratch, "pom.xml")
        pom.write_text(_older_pom(version))
        directory = older_kafka_dir(version)
        return _fetch_jars(f"Apache Kafka {version} (50 MB)", pom, directory)


def have_java_clients() -> bool:
    """Return whether the programs of tests/compat/java are there, and all they need."""
    return have_java_tools() and all(
        (JAVA_DIR / source.name).is_file()
        and (JAVA_DIR / source.name).read_bytes() == source.read_bytes()
        for source in _JAVA_CLIENTS
    )


def build_java_clients() -> str:
    """Compile them, and put them among the jars; return why not, or an empty text."""
    if have_java_clients():
        return ""
    if not have_java_tools():
        return "no jars of Apache Kafka to build clients with"
    if shutil.which("javac") is None:
        return "no javac on PATH (Debian: apt-get install default-jdk-headless)"
    _say("building clients with Kafka's own")
    for source in _JAVA_CLIENTS:
        (JAVA_DIR / source.name).unlink(missing_ok=True)
    why = _compile_java(
        list(map(str, _JAVA_CLIENTS)), f"{JAVA_DIR}/*", JAVA_DIR / "our-clients.jar"
    )
    if not why:
        for source in _JAVA_CLIENTS:
            shutil.copy(source, JAVA_DIR / source.name)
    return why


def _compile_java(sources: list[str], class_path: str, jar: Path) -> str:
    """Make a jar of sources; return why not, or an empty text."""
    with tempfile.TemporaryDirectory() as classes:
        command = ["javac", "-nowarn", "-proc:none", "-cp", class_path]
        command += ["-d", classes, *sources]
        return _run(command, _JAVAC_TIMEOUT_S) or _run(
            ["jar", "--create", "--file", str(jar), "-C", classes, "."],
            _JAVAC_TIMEOUT_S,
        )


def fetch_spark_connector() -> str:
    """Copy the jars to .downloads/spark; return why not, or an empty text."""
    if have_spark_connector():
        return ""
    why = _fetch_jars("Spark's Kafka connector (15 MB)", _SPARK_POM, SPARK_DIR)
    if not why:
        return ""
    # Not every mirror has all of every release.
    older = _fetch_jars("the release before it", _OLDER_SPARK_POM, SPARK_DIR)
    return f"{why}; {older}" if older else ""


def _fetch_jars(what: str, pom: Path, directory: Path) -> str:
    for tool, package in (("java", "default-jre-headless"), ("mvn", "maven")):
        if shutil.which(tool) is None:
            return f"no {tool} on PATH (Debian: apt-get install {package})"
    _say(f"fetching {what} with Maven")
    fresh = directory.with_name(f"{directory.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    goal = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
    error = _run(
        [
            *("mvn", "--quiet", "--batch-mode", "--no-transfer-progress"),
            *("--file", str(pom), goal),
            *(f"-DoutputDirectory={fresh}", "-DincludeScope=runtime"),
        ],
        _MAVEN_TIMEOUT_S,
    )
    if error:
        return f"Maven could not fetch {what}: {error}"
    shutil.copy(pom, fresh / "pom.xml")
    shutil.rmtree(directory, ignore_errors=True)
    fresh.rename(directory)
    return ""


def fetch_franz_go() -> str:
    """Build the client of tests/compat/go; return why not, or an empty text."""
    sources = sorted(_GO_SOURCES.iterdir())
    stamp = FRANZ_GO.with_name("sources")
    text = b"".join(each.read_bytes() for each in sources)
    if FRANZ_GO.exists() and stamp.exists() and stamp.read_bytes() == text:
        return ""
    if shutil.which("go") is None:
        return "no go on PATH (Debian: apt-get install golang)"
    _say("building a client with franz-go")
    FRANZ_GO.parent.mkdir(exist_ok=True)
    FRANZ_GO.unlink(missing_ok=True)
    error = _run(
        ["go", "build", "-C", str(_GO_SOURCES), "-trimpath", "-o", str(FRANZ_GO), "."],
        _GO_TIMEOUT_S,
        CGO_ENABLED="0",
    )
    if error:
        return f"go could not build the client with franz-go: {error}"
    stamp.write_bytes(text)
    return ""


def have_kafkajs() -> bool:
    """Return whether what package.json names is there, and a Node to run it."""
    stamp = NODE_DIR / "package.json"
    wanted = (_NODE_SOURCES / "package.json").read_bytes()
    return (
        shutil.which("node") is not None
        and (NODE_DIR / "node_modules" / "kafkajs").is_dir()
        and stamp.read_bytes() == wanted
    )


def fetch_kafkajs() -> str:
    """Install kafkajs in .downloads/node; return why not, or an empty text."""
    if have_kafkajs():
        return ""
    for tool, package in (("node", "nodejs"), ("npm", "npm")):
        if shutil.which(tool) is None:
            return f"no {tool} on PATH (Debian: apt-get install {package})"
    _say("fetching kafkajs with npm")
    shutil.rmtree(NODE_DIR, ignore_errors=True)
    fresh = NODE_DIR.with_name("node.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    shutil.copy(_NODE_SOURCES / "package.json", fresh)
    error = _run(
        [
            *("npm", "install", "--prefix", str(fresh), "--no-save", "--no-audit"),
            *("--no-fund", "--no-package-lock", "--ignore-scripts"),
        ],
        _NPM_TIMEOUT_S,
    )
    if error:
        return f"npm could not install kafkajs: {error}"
    fresh.rename(NODE_DIR)
    return ""


def prometheus_tool(name: str) -> str | None:
    """Return the path of prometheus or promtool, if it is there."""
    ours = PROMETHEUS_DIR / "usr" / "bin" / name
    return shutil.which(name) or (str(ours) if ours.is_file() else None)


def fetch_prometheus() -> str:
    """Unpack Debian's Prometheus, which installed would serve; return why not."""
    if all(map(prometheus_tool, ("prometheus", "promtool"))):
        return ""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            return f"no promtool on PATH, and no {tool} to fetch Debian's with"
    _say("fetching Debian's Prometheus (19 MB)")
    with tempfile.TemporaryDirectory(dir=PROMETHEUS_DIR.parent) as name:
        scratch = Path(name)
        scratch.chmod(0o755)  # apt's own user writes there
        error = ""
        if os.geteuid() == 0:
            error = _run(["apt-get", "-qq", "update"], _APT_TIMEOUT_S)
        error = error or _run(
            ["env", "-C", name, "apt-get", "-qq", "download", "prometheus"],
            _APT_TIMEOUT_S,
        )
        fresh = scratch / "fresh"
        for package in scratch.glob("*.deb"):
            error = error or _run(
                ["dpkg-deb", "-x", str(package), str(fresh)], _APT_TIMEOUT_S
            )
        if error or not fresh.is_dir():
            return f"Debian's Prometheus cannot be fetched: {error}"
        shutil.rmtree(PROMETHEUS_DIR, ignore_errors=True)
        fresh.rename(PROMETHEUS_DIR)
    return ""


def fetch_debian(tool: str, package: str) -> str:
    """Install a Debian package if that is ours to do; return why not, or nothing."""
    if shutil.which(tool):
        return ""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"no {tool} on PATH (Debian: sudo apt-get install {package})"
    _say(f"installing {package} with apt-get")
    error = _run(["apt-get", "-qq", "update"], _APT_TIMEOUT_S) or _run(
        ["apt-get", "-qq", "install", "-y", "--no-install-recommends", package],
        _APT_TIMEOUT_S,
    )
    return f"apt-get could not install {package}: {error}" if error else ""


def _run(command: list[str], timeout_s: int, **variables: str) -> str:
    """Run a command; return the end of what it said if it failed."""
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", **variables}
    try:
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end after {timeout_s} s"
    if done.returncode == 0:
        return ""
    text = re.sub(r"\x1b\[\d*m", "", done.stdout)  # Maven's colours
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if "[ERROR]" in line][:1] or lines[-1:]
    return lines[0][:300] if lines else f"exit code {done.returncode}"


def _say(text: str) -> None:
    print(f"mpbroker: {text}", file=sys.stderr, flush=True)


def main() -> None:
    downloads = JAVA_DIR.parent
    downloads.mkdir(exist_ok=True)
    lock = os.open(downloads, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        reasons = [fetch_debian(*each) for each in _DEBIAN]
        reasons += [fetch_java_tools(), build_java_clients(), fetch_spark_connector()]
        reasons += [fetch_older_kafka(version) for version in OLDER_KAFKAS]
        reasons += [fetch_franz_go(), fetch_kafkajs(), fetch_prometheus()]
        for reason in reasons:
            if reason:
                _say(f"{reason}; the tests with it will be skipped")
    finally:
        os.close(lock)


if __name__ == "__main__":
    main()
