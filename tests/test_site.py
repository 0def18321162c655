"""The documentation site: strict build, valid links, no external resources, a complete reference."""

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

pytestmark = pytest.mark.slow
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
    """A parsed page: its anchors, its links, the resources a browser loads for it, its text."""

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
    """Every page of the site, by file."""
    folder = tmp_path_factory.mktemp("site")
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return {path: Page(path) for path in folder.rglob("*.html")}


def local(page: Page, link: str) -> tuple[Path, str] | None:
    """The file and anchor a link points to, or None for an external link."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
    return (target / "index.html" if target.is_dir() else target), unquote(parts.fragment)


def test_links_and_anchors_exist(site):
    followed = 0
    for page in site.values():
        if page.path.name == "404.html":  # served at any address, so its links are absolute
            continue
        for link in (*page.links, *page.loads):
            target = local(page, link)
            if target is None:
                continue
            file, anchor = target
            assert file.exists(), f"{page.path.name} links to {link}"
            if anchor and file in site:
                assert anchor in site[file].anchors, f"{page.path.name} links to {link}"
            followed += 1
    assert followed


def test_no_external_resources(site):
    for page in site.values():
        foreign = [link for link in page.loads if urlsplit(link).netloc]
        assert not foreign, f"{page.path.name} loads {foreign}"
        # The theme's script would fetch the Mermaid library and repository statistics for these.
        assert 'class="mermaid"' not in page.path.read_text()
        assert 'data-md-component="source"' not in page.path.read_text()
    folder = next(path for path in site if path.name == "404.html").parent
    sheets = [*folder.rglob("*.css"), *folder.rglob("*.svg")]
    assert sheets
    for sheet in sheets:
        assert not re.search(r"(url\(|@import\s+|(?:href|src)=)[\"']?(https?:)?//", sheet.read_text()), sheet


def test_the_landing_page_has_structured_metadata(site):
    marker = re.compile(r'<script type="application/ld\+json">(.*?)</script>', flags=re.DOTALL)
    found = {path: marker.findall(path.read_text()) for path in site}
    home = next(path for path in site if path.name == "404.html").parent / "index.html"
    assert [path for path, scripts in found.items() if scripts] == [home]
    about = json.loads(found[home][0])
    assert (about["@context"], about["@type"]) == ("https://schema.org", "SoftwareSourceCode")
    assert (about["version"], about["programmingLanguage"]) == (ah.__version__, "Python")
    assert about["license"].endswith("/MIT.html")
    assert "attention" in about["keywords"]
    assert len(about["citation"]["author"]) == 6
    head = home.read_text().partition("</head>")[0]
    assert found[home][0] in head
    assert '<meta name="description" content="Adaptive Hopfield layers' in head


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


def test_docstrings_are_rendered_as_markdown(site):
    reference = [page for path, page in site.items() if path.parent.name == "api"]
    assert reference
    for page in reference:
        assert not re.search(r":(class|func|meth|mod):", page.text), page.path
        assert "blockquote" not in page.tags, f"{page.path}: a doctest was rendered as a quotation"


def test_formulas_are_rendered_as_mathml(site):
    page = next(page for path, page in site.items() if path.name == "mathematics.html")
    formulas = re.findall(r"\$\$[^$]+\$\$|\$[^$]+\$", (ROOT / "docs" / "mathematics.md").read_text())
    assert page.tags.count("math") == len(formulas)
    assert "$" not in page.text
    assert "\\" not in page.text
    assert "arithmatex" not in page.path.read_text()


def test_every_notebook_has_a_page_with_a_download_link(site):
    notebooks = sorted((ROOT / "docs").rglob("*.ipynb"))
    for notebook in notebooks:
        page = next(page for path, page in site.items() if path.parts[-2:] == ("notebooks", f"{notebook.stem}.html"))
        assert f"{notebook.stem}.ipynb" in page.links
        for cell in json.loads(notebook.read_text())["cells"]:
            first = "".join(cell["source"]).split("\n")[0]
            assert first.lstrip("# ").split("`")[0].strip() in page.text


def test_notebook_outputs_are_on_its_page(site):
    for notebook in (ROOT / "docs").rglob("*.ipynb"):
        page = next(page for path, page in site.items() if path.parts[-2:] == ("notebooks", f"{notebook.stem}.html"))
        outputs = [out for cell in json.loads(notebook.read_text())["cells"] for out in cell.get("outputs", [])]
        drawn = sum("image/png" in out.get("data", {}) for out in outputs)
        assert len([link for link in page.loads if link.startswith(f"{notebook.stem}-")]) == drawn
        for out in outputs:
            assert "".join(out.get("text", "")).strip() in page.text
