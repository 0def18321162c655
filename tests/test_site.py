"""The documentation site: strict build, which checks links and anchors, no external resources, a complete reference."""

import base64
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import ahop_layers as ah

for tool in ("mkdocs", "material", "mkdocstrings", "latex2mathml", "griffe"):
    pytest.importorskip(tool, reason=f'building the site needs {tool}: "pip install --group docs"')

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
FETCHED = {("link", "href"), ("object", "data"), *((tag, "src") for tag in ("img", "script", "iframe", "source"))}


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


def build(folder: Path) -> dict[str, Page]:
    """Builds the site and returns every page by its path without suffix."""
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return {str(path.relative_to(folder).with_suffix("")): Page(path) for path in folder.rglob("*.html")}


def test_the_site(tmp_path):
    """One test, so that the parallel workers of pytest build the site once."""
    site = build(tmp_path)
    no_external_resources(site)
    landing_page_has_structured_metadata(site)
    reference_has_every_public_name(site)
    docstrings_formulas_and_notebooks_are_rendered(site)


def no_external_resources(site):
    for page in site.values():
        foreign = [link for link in page.loads if urlsplit(link).netloc]
        assert not foreign, f"{page.path.name} loads {foreign}"
        # The theme's script would fetch the Mermaid library and repository statistics for these.
        assert 'class="mermaid"' not in page.path.read_text()
        assert 'data-md-component="source"' not in page.path.read_text()
    folder = site["404"].path.parent
    sheets = [*folder.rglob("*.css"), *folder.rglob("*.svg")]
    assert sheets
    for sheet in sheets:
        assert not re.search(r"(url\(|@import\s+|(?:href|src)=)[\"']?(https?:)?//", sheet.read_text()), sheet


def landing_page_has_structured_metadata(site):
    head = site["index"].path.read_text().partition("</head>")[0]
    about = json.loads(re.search(r'<script type="application/ld\+json">(.*?)</script>', head, flags=re.DOTALL)[1])
    assert (about["@type"], about["version"]) == ("SoftwareSourceCode", ah.__version__)


def reference_has_every_public_name(site):
    anchors = {anchor for page in site.values() for anchor in page.anchors}
    public = [name for name in ah.__all__ if name != "variants"]
    for part in ("variants", "neighbors", "plots", "torchmil"):
        module = import_module(f"ahop_layers.{part}")
        here = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        public += [f"{part}.{name}" for name in getattr(module, "__all__", here) if not name.startswith("_")]
    assert not {f"ahop_layers.{name}" for name in public} - anchors


def docstrings_formulas_and_notebooks_are_rendered(site):
    for name, page in site.items():
        if name.startswith("api/"):
            assert not re.search(r":(class|func|meth|mod):", page.text), name
            assert "blockquote" not in page.tags, f"{name}: a doctest was rendered as a quotation"
    source = (ROOT / "docs" / "mathematics.md").read_text()
    assert site["mathematics"].tags.count("math") == len(re.findall(r"\$\$[^$]+\$\$|\$[^$]+\$", source))
    assert not re.search(r"[$\\]", site["mathematics"].text)
    for notebook in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        page = site[f"notebooks/{notebook.stem}"]
        assert notebook.name in page.links
        for cell in json.loads(notebook.read_text())["cells"]:
            first = "".join(cell["source"]).split("\n")[0]
            assert first.lstrip("# ").split("`")[0].strip() in page.text


def test_outputs_of_an_executed_notebook_are_on_its_page():
    spec = spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    hooks = module_from_spec(spec)
    spec.loader.exec_module(hooks)
    printed = [{"output_type": "stream", "text": [text]} for text in ("one\n", "two\n")]
    drawn = {"image/png": base64.b64encode(b"picture").decode(), "text/plain": ["<Figure>"]}
    results = [{"output_type": "execute_result", "data": data} for data in (drawn, {"text/plain": ["3"]})]
    parts = hooks.notebook_parts([{"cell_type": "code", "source": ["f()"], "outputs": [*printed, *results]}])
    assert [*parts] == ["```python\nf()\n```", "```text\none\ntwo\n```", b"picture", "```text\n3\n```"]
