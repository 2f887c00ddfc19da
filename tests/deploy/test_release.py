"""What `scripts/release` makes and refuses, with a core that is compiled already."""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

import mpbroker
from deploy import first_use, prove, release
from deploy.release import PLATFORMS, ReleaseError

ROOT = Path(__file__).resolve().parents[2]
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
NATIVE = ROOT / "mpbroker" / "native"
HEADERS = Path(sysconfig.get_path("include"))
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
HERE = PLATFORMS[0]

with_git = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(),
    reason="no git checkout",
)
with_core = pytest.mark.skipif(
    not all((NATIVE / f"{name}{SUFFIX}").exists() for name in release.CORE)
    or HERE.triplet not in str(SUFFIX),
    reason="no compiled core for x86_64",
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return release.take_sources("HEAD", tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def pure(sources):
    return release.pure_wheel(sources)


@pytest.fixture(scope="module")
def core():
    return {name: (NATIVE / f"{name}{SUFFIX}").read_bytes() for name in release.CORE}


@with_git
def test_an_sdist_has_all_but_the_tests_and_equal_bytes_each_time(
    sources, pure, tmp_path
):
    metadata = pure[release.file_in_dist_info(pure, "METADATA")]
    made = []
    for number in ("1", "2"):
        (tmp_path / number).mkdir()
        made.append(release.write_sdist(sources, metadata, tmp_path / number))
        release.check_sdist(made[-1], sources)
    assert made[0].read_bytes() == made[1].read_bytes()
    assert made[0].name == f"mpbroker_server-{mpbroker.__version__}.tar.gz"
    fewer = release.Sources(sources.folder, sources.names[1:], sources.epoch)
    lacking = release.write_sdist(fewer, metadata, tmp_path)
    with pytest.raises(ReleaseError, match=f"lacks {sources.names[0]}"):
        release.check_sdist(lacking, sources)


@with_git
@with_core
def test_a_wheel_has_equal_bytes_each_time(sources, pure, core, tmp_path):
    made = []
    for number in ("1", "2"):
        (tmp_path / number).mkdir()
        made.append(
            release.write_wheel(
                pure, core, PYTHON, HERE, sources.epoch, tmp_path / number
            )
        )
    assert made[0].read_bytes() == made[1].read_bytes()


@with_git
@with_core
def test_a_new_user_installs_upgrades_and_uninstalls_a_wheel(
    sources, pure, core, tmp_path
):
    """The short form of `scripts/prove`, with what the tests have installed."""
    named = Path(shutil.copytree(sources.folder, tmp_path / "later"))
    prove.raise_version(named)
    later = release.pure_wheel(release.Sources(named, sources.names, sources.epoch))
    wheels = [
        release.write_wheel(files, core, PYTHON, HERE, sources.epoch, tmp_path)
        for files in (pure, later)
    ]
    borrowed = next(each for each in sys.path if each.endswith("site-packages"))
    first_use.walk(*wheels, tmp_path, borrowed)


def test_a_later_version_is_one_for_pip_too(tmp_path):
    module = tmp_path / release.VERSION_FILE
    module.parent.mkdir()
    for own in ("1.2.3", "1.2.3rc1", "0.1.0.dev0"):
        module.write_text(f'__version__: Final = "{own}"\n')
        prove.raise_version(tmp_path)
        assert Version(release.version_of(tmp_path)) > Version(own)


def test_what_a_proof_needs_and_does_not_find_is_named(monkeypatch, capsys):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert prove.main(["bookworm"]) == prove.NOT_RUN
    assert "only root makes roots: sudo scripts/prove" in capsys.readouterr().err
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert prove.main(["bookworm"]) == prove.NOT_RUN
    assert "no debootstrap: apt-get install debootstrap" in capsys.readouterr().err


def test_a_proof_s_user_has_the_way_to_package_indexes_and_no_other_variable(
    monkeypatch,
):
    monkeypatch.setattr(
        "os.environ", {"PIP_CERT": "a", "https_proxy": "b", "HOME": "c"}
    )
    assert prove.shared_variables() == {"PIP_CERT": "a", "https_proxy": "b"}


@with_git
def test_a_wheel_without_the_core_or_with_anothers_is_refused(sources, pure, tmp_path):
    elf = bytearray(b"\x7fELF" + bytes(60))
    elf[18] = HERE.elf_machine
    whole = dict.fromkeys(release.CORE, bytes(elf))

    def write(core, platform=HERE, files=pure):
        return release.write_wheel(files, core, "3.12", platform, 2**30, tmp_path)

    release.check_wheel(write(whole))
    for name in release.CORE:
        lacking = {key: each for key, each in whole.items() if key != name}
        with pytest.raises(ReleaseError, match=f"no compiled {name}"):
            release.check_wheel(write(lacking))
    with pytest.raises(ReleaseError, match="another machine"):
        release.check_wheel(write(whole, PLATFORMS[1]))
    named = whole | {"_core": bytes(elf) + str(ROOT).encode()}
    with pytest.raises(ReleaseError, match="a path of this machine"):
        release.check_wheel(write(named))
    strays = {**pure, "tests/test_x.py": b""}
    with pytest.raises(ReleaseError, match=r"has tests/test_x\.py"):
        release.check_wheel(write(whole, files=strays))


@pytest.mark.skipif(find_spec("ziglang") is None, reason="no zig")
@pytest.mark.skipif(not (HEADERS / "Python.h").exists(), reason="no Python.h")
def test_the_core_asks_for_nothing_that_an_old_glibc_lacks(tmp_path, monkeypatch):
    """Releases are seldom made, and changes of C often."""
    quick = (*("-O0", "-fno-sanitize=undefined", "-w"), *("-fPIC", "-shared"))
    monkeypatch.setattr(release, "FLAGS", quick)
    here = release.Sources(ROOT, (), 0)
    core = release.compile_core(here, HEADERS, HERE, release.zig(HERE))
    assert core.keys() == set(release.CORE)


@with_git
def test_a_wheel_says_what_it_is_for_and_its_record_is_true(sources, pure, tmp_path):
    wheel = release.write_wheel(pure, {}, "3.13", PLATFORMS[1], 2**30, tmp_path)
    files = release.read_wheel(wheel)
    about = files[release.file_in_dist_info(files, "WHEEL")].decode().splitlines()
    assert "Root-Is-Purelib: false" in about
    tags = [line for line in about if line.startswith("Tag: ")]
    assert tags == [
        "Tag: cp313-cp313-manylinux_2_17_aarch64",
        "Tag: cp313-cp313-manylinux2014_aarch64",
    ]
    record = files[release.file_in_dist_info(files, "RECORD")].decode()
    assert {line.split(",")[0] for line in record.splitlines()} == set(files)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
    readme = files[release.file_in_dist_info(files, "METADATA")].decode()
    assert "](docs/" not in readme and "Name: mpbroker-server" in readme


def test_relative_links_of_the_readme_become_absolute_or_text():
    text = "[a](docs/a.md#b) [c](https://example.org/c) [d](LICENSE)"
    assert release.without_relative_links(text, "https://example.org/v1/") == (
        "[a](https://example.org/v1/docs/a.md#b) [c](https://example.org/c)"
        " [d](https://example.org/v1/LICENSE)"
    )
    assert release.without_relative_links(text, "") == (
        "a [c](https://example.org/c) d"
    )


def test_the_bill_of_materials_names_all_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    made = json.loads(release.bill_of_materials(project, "1.2.3", 0))
    assert made["metadata"]["component"]["purl"] == "pkg:pypi/mpbroker-server@1.2.3"
    assert made["metadata"]["timestamp"] == "1970-01-01T00:00:00Z"
    told = {each["properties"][0]["value"] for each in made["components"]}
    assert told == set(project["dependencies"])


@pytest.fixture
def repository(tmp_path):
    """A git repository with the two files that a release changes."""
    folder = tmp_path / "repository"
    for name in (release.VERSION_FILE, release.CHANGELOG):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for words in (
        ["init", "--quiet"],
        ["config", "user.name", "nobody"],
        ["config", "user.email", "nobody@example.org"],
        ["add", "--all"],
        ["commit", "--quiet", "-m", "begin"],
    ):
        release._git(folder, *words)
    return folder


@with_git
def test_a_release_is_a_commit_of_version_and_changelog_on_no_branch(
    repository, tmp_path
):
    before = release._git(repository, "rev-parse", "HEAD")
    commit = release.commit_release("1.2.3", tmp_path, repository)
    assert release._git(repository, "rev-parse", "HEAD") == before
    assert not release._git(repository, "status", "--porcelain")

    def file(name):
        return release._git(repository, "show", f"{commit}:{name}").decode()

    assert '__version__: Final = "1.2.3"' in file(release.VERSION_FILE)
    assert "## [Unreleased]\n\n## [1.2.3] - 20" in file(release.CHANGELOG)
    (repository / "more").write_text("")
    with pytest.raises(ReleaseError, match="not committed"):
        release.commit_release("1.2.4", tmp_path, repository)


@with_git
@pytest.mark.parametrize("version", ["1.2", "v1.2.3", "1.2.3 ", "1.2.3.dev0"])
def test_what_is_no_version_is_refused(repository, version):
    with pytest.raises(ReleaseError, match="is not a version"):
        release.name_version(repository, version, "2026-01-01")


@with_git
def test_a_version_is_released_once_and_with_something_new(repository):
    release.name_version(repository, "1.2.3", "2026-01-01")
    with pytest.raises(ReleaseError, match=r"has \[1.2.3\]"):
        release.name_version(repository, "1.2.3", "2026-01-02")
    with pytest.raises(ReleaseError, match="nothing below"):
        release.name_version(repository, "1.2.4", "2026-01-02")


def test_a_python_that_is_not_there_is_named():
    with pytest.raises(ReleaseError, match=r"no Python 3\.99"):
        release.pythons([], ["3.99"])


def test_headers_say_which_python_they_are_of(tmp_path):
    with pytest.raises(ReleaseError, match="has no headers"):
        release.version_of_headers(tmp_path)
    lines = "#define PY_MAJOR_VERSION\t3\n#define PY_MINOR_VERSION\t14\n"
    (tmp_path / "patchlevel.h").write_text(f"{lines}#define PY_MICRO_VERSION\t0\n")
    assert release.version_of_headers(tmp_path) == "3.14"
    if (HEADERS / "Python.h").exists():
        assert release.version_of_headers(HEADERS) == PYTHON
