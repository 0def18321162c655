"""The documentation site: strict build, which checks links and anchors, no external resources, a complete reference."""

import json
import os
import re
import subprocess
import sys
from html import unescape
from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import ahop_layers as ah

for tool in ("mkdocs", "material", "mkdocstrings", "latex2mathml", "griffe"):
    pytest.importorskip(tool, reason=f'building the site needs {tool}: "pip install --group docs"')

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
LOADED = re.compile(r'<(?:link|object|img|script|iframe|source)\b[^>]*?\s(?:href|data|src)="([^"]+)"')


def build(folder: Path) -> dict[str, str]:
    """Builds the site and returns the HTML of every page by its path without suffix."""
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(folder),
    ]  # --quiet counts no warnings
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {str(path.relative_to(folder).with_suffix("")): path.read_text() for path in folder.rglob("*.html")}


def text_of(page: str) -> str:
    """Returns what a reader sees of a page."""
    return unescape(re.sub(r"<[^>]+>", "", re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)))


def test_the_site(tmp_path):
    """One test, so that the parallel workers of pytest build the site once."""
    site = build(tmp_path)
    for name, page in site.items():
        foreign = [link for link in LOADED.findall(page) if urlsplit(link).netloc]
        assert not foreign, f"{name} loads {foreign}"
    for sheet in (*tmp_path.rglob("*.css"), *tmp_path.rglob("*.svg")):
        assert not re.search(r"(url\(|@import\s+|(?:href|src)=)[\"']?(https?:)?//", sheet.read_text()), sheet
    about = re.search(r'<script type="application/ld\+json">(.*?)</script>', site["index"], flags=re.DOTALL)
    assert json.loads(about[1])["version"] == ah.__version__
    reference_has_every_public_name(site)
    docstrings_formulas_and_notebooks_are_rendered(site)


def reference_has_every_public_name(site):
    anchors = {anchor for page in site.values() for anchor in re.findall(r'\bid="([^"]+)"', page)}
    public = [name for name in ah.__all__ if name != "variants"]
    for part in ("memory.variants", "neighbors", "plots", "torchmil"):
        module = import_module(f"ahop_layers.{part}")
        here = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        public += [f"{part}.{name}" for name in getattr(module, "__all__", here) if not name.startswith("_")]
    assert not {f"ahop_layers.{name}" for name in public} - anchors


def docstrings_formulas_and_notebooks_are_rendered(site):
    for name, page in site.items():
        if name.startswith("api/"):
            assert not re.search(r":(class|func|meth|mod):", text_of(page)), name
            assert "<blockquote" not in page, f"{name}: a doctest was rendered as a quotation"
    source = (ROOT / "docs" / "mathematics.md").read_text()
    assert site["mathematics"].count("<math ") == len(re.findall(r"\$\$[^$]+\$\$|\$[^$]+\$", source))
    assert not re.search(r"[$\\]", text_of(site["mathematics"]))
    for notebook in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        page = text_of(site[f"notebooks/{notebook.stem}"])
        for cell in json.loads(notebook.read_text())["cells"]:
            first = "".join(cell["source"]).split("\n")[0]
            assert first.lstrip("# ").split("`")[0].strip() in page
