"""The documentation site: strict build, valid links, no external resources, a complete reference."""

import inspect
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

for tool in ("mkdocs", "material", "mkdocstrings", "latex2mathml", "griffe"):
    pytest.importorskip(tool, reason=f'building the site needs {tool}: "pip install --group docs"')
griffe = sys.modules["griffe"]

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


@pytest.fixture(scope="session")
def reference() -> dict[str, "griffe.Object"]:
    """The objects of the reference by name, as the site shows them."""
    extensions = griffe.load_extensions(str(ROOT / "docs" / "docstrings.py"))
    options = {"warn_missing_types": False, "warn_unknown_params": False}
    package = griffe.load(
        "ahop_layers",
        search_paths=[ROOT],
        extensions=extensions,
        docstring_parser="google",
        docstring_options=options,
    )
    shown = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    objects = {name: package[name] for name in re.findall(r"^::: ahop_layers\.(\S+)", shown, flags=re.MULTILINE)}
    modules = [(name, obj) for name, obj in objects.items() if obj.is_module]
    for name, obj in modules:
        objects |= {f"{name}.{each}": member for each, member in obj.members.items() if not member.is_alias}
    return {
        name: obj.final_target if obj.is_alias else obj
        for name, obj in objects.items()
        if not obj.name.startswith("_") and not obj.is_module
    }


def explained(obj: "griffe.Object") -> set[str]:
    """The arguments that a docstring describes."""
    sections = obj.docstring.parsed if obj.docstring else []
    entries = [each for section in sections if section.kind.value == "parameters" for each in section.value]
    return {name.strip().lstrip("*") for entry in entries for name in entry.name.split(",")}


def arguments(obj: "griffe.Object") -> set[str]:
    return {each.name for each in obj.parameters} - {"self", "cls"}


def test_the_reference_explains_every_argument(reference):
    functions = {name: obj for name, obj in reference.items() if obj.is_function}
    classes = {name: obj for name, obj in reference.items() if obj.is_class}
    for other in ("Report", "tabular.AdaptiveMemoryRegressor"):  # a result; a class that refers to another one
        classes.pop(other)
    calls = {f"{name}.forward": obj["forward"] for name, obj in classes.items() if "forward" in obj.members}
    assert {"AdaptiveHopfieldLayer", "AdaptiveSimilarity", "variants.Mixed"} <= classes.keys()
    assert {"adapt_", "parameter_groups"} <= functions.keys()
    assert {"AdaptiveAttention.forward", "AdaptiveSimilarity.forward"} <= calls.keys()
    missing = {name: arguments(obj) - explained(obj) for name, obj in (classes | functions | calls).items()}
    assert {name: names for name, names in missing.items() if names} == {}


def test_the_signature_of_a_hopfield_layer_is_the_one_shown(reference):
    for name in ("AdaptiveHopfield", "AdaptiveHopfieldLayer", "AdaptiveHopfieldPooling"):
        assert arguments(reference[name]) == set(inspect.signature(getattr(ah, name)).parameters)
        assert explained(reference[name]) == arguments(reference[name])  # and none that it does not have


def test_types_in_signatures_are_links(site):
    api = {path.stem: path.read_text() for path in site if path.parent.name == "api"}
    signatures = {
        name: "".join(re.findall(r'<div class="doc-signature.*?</div>', text, flags=re.DOTALL))
        for name, text in api.items()
    }
    for kind in ("similarity.BlocksArgument", "separation.Separation"):
        assert re.search(rf'<a [^>]*title="[^"]*{kind}[^"]*" href="', signatures["layers"]), kind
    plain = set(re.findall(r'title="(ahop_layers\.[\w.]+)"', re.sub(r"<a .*?</a>", "", "".join(signatures.values()))))
    private = {name for name in plain if name.split(".")[-1].startswith("_")}
    assert plain - private <= {"ahop_layers.memory.store.Store", "ahop_layers.tabular.rows.Array"}


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
