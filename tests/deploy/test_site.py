"""The documentation's site: every document has a place, and every link leads there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from deploy import site


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    site.build_site(folder)
    return folder


def test_the_site_has_every_document_and_both_references(built):
    pages = {path.relative_to(built) for path in built.rglob("*.html")}
    for path in site.documents():
        name = "index.html" if path.name == "README.md" else f"{path.stem}.html"
        assert path.parent / name in pages
    settings = (built / "reference/settings.html").read_text()
    assert 'id="numiothreads"' in settings
    assert "mpbroker topic create" in (built / "reference/commands.html").read_text()


def test_no_page_asks_another_server(built):
    for page in built.rglob("*.html"):
        asked = re.findall(
            r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"(https?:[^\"]*)\"",
            page.read_text(),
        )
        assert not asked, page


@pytest.mark.parametrize(
    "link", ["[x](docs/no-such.md)", "[x](docs/client.md#no-such)", "[x](/client.md)"]
)
def test_a_link_that_leads_nowhere_ends_the_build(tmp_path, link):
    tree = tmp_path / "tree"
    site.write_tree(tree)
    with (tree / "README.md").open("a") as file:
        file.write(f"\n{link}\n")
    shutil.copy(site.ROOT / "docs/mkdocs.yml", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", tmp_path / "site"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert link.partition("(")[2].rstrip(")") in done.stderr
