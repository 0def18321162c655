"""README and pages: code runs, links resolve; tables, plots and quoted figures match benchmark rows."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import test_theorems
from frameworks import framework

from benchmarks.harness import pages

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
ELEMENT_ID = re.compile(r'(id="|href="#|url\(#)[^")]*')  # matplotlib derives it from rounded numbers
FIGURE = re.compile(r"\b0\.\d{3,}|\b\d\.\d\d(?= x\b)|\b\d+(?:\.\d+)?(?= ms\b)")

# Page -> start of a part of its text -> the tables that the figures of this part come from.
QUOTED = {
    "README.md": {
        "\n| [Hopfield layers]": "summary-speed hflayers",
        "\n| [ViTs]": "vit summary-speed",
        "## Search with": "search-costs",
        "## Repair before": "repair",
        "\n| [faces]": "search",
        "\n| [AR]": "ar",
        "\n| [bags]": "lookup-bags",
        "\n| [small ViT]": "images-damaged",
    },
    "docs/index.md": {"![Six faces": "search"},
    "docs/benchmarks-search.md": {"## Real images": "search", "## Disguised faces": "ar"},
    "docs/when-does-it-help.md": {
        "## Where it helps": "retrieval mixtures ablations robust-ablation",
        "### Bags": "bags bags-damaged",
        "### Vision transformers": "images images-damaged",
    },
}


def full(names, quick):
    """Parameters of which only the quick ones are in ``make test``."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.full) for name in names]


CODE = [page.name for page in PAGES if "```python" in page.read_text()]


@pytest.mark.parametrize("name", full(CODE, {*CODE} - {"index.md", "search.md", "neighbors.md"}))
def test_every_python_block_runs_alone(name, small_fit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some blocks write files
    text = next(page for page in PAGES if page.name == name).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    for needed in ("timm", "torchvision", "transformers", "peft", "pytorch_metric_learning"):
        if re.search(rf"^(import|from) {needed}", "\n".join(blocks), flags=re.MULTILINE):
            framework(needed)
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{name} block {number}", "exec"), {})


def _leads_somewhere(link):
    page, _, anchor = link.partition("#")
    path = ROOT / page
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE) if anchor and path.is_file() else []
    return path.is_file() and (not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings})


def test_links_commands_and_tests_in_the_text_exist():
    links = re.findall(r"\]\(([^)]+)\)", README.read_text())
    text = "".join(path.read_text() for path in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"))
    modules = set(re.findall(r"python -m ((?:ahop_layers|benchmarks|examples)[\w.]*\w)", text))
    tests = re.findall(r"`(test_\w+)`", (DOCS / "mathematics.md").read_text())
    assert links and modules and tests  # noqa: PT018
    assert not [link for link in links if not _leads_somewhere(link)]
    files = {each: [ROOT / f"{each.replace('.', '/')}{end}" for end in (".py", "/__main__.py")] for each in modules}
    assert not [each for each, paths in files.items() if not any(path.is_file() for path in paths)]
    assert not [name for name in tests if not hasattr(test_theorems, name)]


def test_readme_and_pages_are_short():
    texts = [*ROOT.glob("*.md"), *ROOT.glob("examples/*.md"), *DOCS.rglob("*.md")]
    lengths = {path: len(path.read_text().splitlines()) for path in texts}
    assert len([*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]) <= 22
    assert lengths[README] <= 150
    assert max(lengths.values()) <= 350
    assert sum(lengths.values()) <= 3200


def test_tables_are_what_the_command_writes():
    places = []
    for page in PAGES:
        text = page.read_text()
        places += [name for _, name, _ in pages.PLACE.findall(text)]
        assert text.count("<!-- made:") == len(pages.PLACE.findall(text)), page  # each has its end
        assert page == README or pages.fill(text) == text, f"the rows of {page} have changed: make pages"
    assert {*places} == {*pages.TABLES, *(f"{name}-picture" for name in pages.DRAWN)}


@pytest.mark.parametrize("name", [name for name, it in pages.DRAWN.items() if it.rows()])
def test_plots_are_what_the_command_draws(name, tmp_path):
    if f"matplotlib=={version('matplotlib')}\n" not in (ROOT / "constraints.txt").read_text():
        pytest.skip("plots are compared for the matplotlib of constraints.txt only: other versions write other SVG")
    pages.DRAWN[name].draw(pages.DRAWN[name].rows(), tmp_path / "drawn.svg")
    pictures = (tmp_path / "drawn.svg", DOCS / "pictures" / f"{name}.svg")
    drawn, kept = (ELEMENT_ID.sub("", path.read_text()) for path in pictures)
    assert NUMBER.sub("", drawn) == NUMBER.sub("", kept), "the rows have changed: make pages"
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (drawn, kept)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.01)  # the last digits depend on the machine


@pytest.mark.parametrize("page", QUOTED)
def test_figures_in_the_text_are_in_their_table(page):
    """Figures of three digits or more, ratios, and milliseconds; a table may have one digit more than the text."""
    text = re.sub(r"```.*?```", "", pages.PLACE.sub("", (ROOT / page).read_text()), flags=re.DOTALL)
    starts = [*(text.index(start) for start in QUOTED[page]), len(text)]
    for names, start, end in zip(QUOTED[page].values(), starts, starts[1:], strict=False):
        found = re.findall(r"\b\d+(?:\.\d+)?\b", "".join(pages.TABLES[name]() for name in names.split()))
        quoted = set(FIGURE.findall(text[start:end]))
        assert quoted
        assert quoted <= {*found, *(f"{float(figure):.3f}" for figure in found)}, f"figures that are not in {names}"


def test_the_tests_of_promises_exist():
    text = (DOCS / "testing.md").read_text().partition("## Promises and their tests")[2].partition("\n## ")[0]
    named = re.findall(r"`(\w+)\.py::(\w+)`", text)
    assert len(named) > 10
    assert not [test for file, test in named if f"def {test}(" not in (ROOT / "tests" / f"{file}.py").read_text()]
