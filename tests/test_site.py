"""The documentation site: it builds strictly, links lead somewhere, no other host is asked, no name is left out."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import ahop_layers as ah

for tool in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
    pytest.importorskip(tool, reason=f'building the site needs {tool}: "pip install --group docs"')

ROOT = Path(__file__).parents[1]
FETCHED = {
    ("img", "src"),
    ("script", "src"),
    ("link", "href"),
    ("iframe", "src"),
    ("source", "src"),
    ("object", "data"),
}


class Page(HTMLParser):
    """What a page is: its anchors, where it leads, what a browser loads for it, its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.anchors, self.links, self.loads, self.tags, self.text = path, set(), [], [], [], ""
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            if (tag, name) in FETCHED:
                self.loads.append(value)
            if (tag, name) == ("a", "href"):
                self.links.append(value)

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> dict[Path, Page]:
    """Every page of the site by its file."""
    folder = tmp_path_factory.mktemp("site")
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return {path: Page(path) for path in folder.rglob("*.html")}


def local(page: Page, link: str) -> tuple[Path, str] | None:
    """The file and anchor that a link leads to, None where it leads to another host."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
    return (target / "index.html" if target.is_dir() else target), unquote(parts.fragment)


def test_links_and_anchors_lead_somewhere(site):
    followed = 0
    for page in site.values():
        if page.path.name == "404.html":  # shown at any address, so its links start at the root of a server
            continue
        for link in (*page.links, *page.loads):
            target = local(page, link)
            if target is None:
                continue
            file, anchor = target
            assert file.exists(), f"{page.path.name} leads to {link}"
            if anchor and file in site:
                assert anchor in site[file].anchors, f"{page.path.name} leads to {link}"
            followed += 1
    assert followed > 1000


def test_nothing_is_loaded_from_another_host(site):
    for page in site.values():
        foreign = [link for link in page.loads if urlsplit(link).netloc]
        assert not foreign, f"{page.path.name} loads {foreign}"
        # What the theme's script could fetch: a picture of a diagram's language, and facts about a repository.
        assert 'class="mermaid"' not in page.path.read_text()
        assert 'data-md-component="source"' not in page.path.read_text()
    folder = next(iter(site)).parent
    sheets = [*folder.rglob("*.css"), *folder.rglob("*.svg")]
    assert len(sheets) > 5
    for sheet in sheets:
        assert not re.search(r"(url\(|@import\s+|(?:href|src)=)[\"']?(https?:)?//", sheet.read_text()), sheet


def test_the_reference_has_every_public_name(site):
    anchors = {anchor for page in site.values() for anchor in page.anchors}
    for name in ah.__all__:
        if name != "variants":
            assert f"ahop_layers.{name}" in anchors, name
    for part in ("variants", "tabular", "plots", "torchmil"):
        module = import_module(f"ahop_layers.{part}")
        here = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        public = [name for name in getattr(module, "__all__", here) if not name.startswith("_")]
        assert public
        for name in public:
            assert f"ahop_layers.{part}.{name}" in anchors, name


def test_docstrings_are_read_as_they_are_meant(site):
    reference = [page for path, page in site.items() if path.parent.name == "api"]
    assert len(reference) >= 8
    for page in reference:
        assert not re.search(r":(class|func|meth|mod):", page.text), page.path
        assert "blockquote" not in page.tags, f"{page.path}: an example is no quotation"
    text = "".join(page.text for page in reference)
    assert text.count(">>> ") > 40


def test_formulas_are_drawn_without_a_script(site):
    page = next(page for path, page in site.items() if path.name == "mathematics.html")
    assert page.tags.count("math") > 25
    assert "$" not in page.text
    assert "\\" not in page.text
    assert "arithmatex" not in page.path.read_text()


def test_every_notebook_has_its_page_and_can_be_taken_along(site):
    notebooks = sorted((ROOT / "docs").rglob("*.ipynb"))
    assert notebooks
    for notebook in notebooks:
        page = next(page for path, page in site.items() if path.parts[-2:] == ("notebooks", f"{notebook.stem}.html"))
        assert f"{notebook.stem}.ipynb" in page.links
        for cell in json.loads(notebook.read_text())["cells"]:
            first = "".join(cell["source"]).split("\n")[0]
            assert first.lstrip("# ").split("`")[0].strip() in page.text


def test_what_a_notebook_printed_and_drew_is_on_its_page(site):
    for notebook in (ROOT / "docs").rglob("*.ipynb"):
        page = next(page for path, page in site.items() if path.parts[-2:] == ("notebooks", f"{notebook.stem}.html"))
        outputs = [out for cell in json.loads(notebook.read_text())["cells"] for out in cell.get("outputs", [])]
        drawn = sum("image/png" in out.get("data", {}) for out in outputs)
        assert len([link for link in page.loads if link.startswith(f"{notebook.stem}-")]) == drawn > 0
        for out in outputs:
            assert "".join(out.get("text", "")).strip() in page.text
