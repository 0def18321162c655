"""README and pages: every code block runs alone; tables, plots and quoted figures match the benchmark rows."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import test_theorems
from frameworks import framework

from benchmarks import kernels_report, summary, vit_report
from benchmarks.harness import pages
from benchmarks.harness.report import table
from benchmarks.paper.images import report as images_report

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
FIGURES = [DOCS / f"{name}.md" for name in ("benchmarks-speed", "benchmarks-accuracy", "blocks", "search")]
CODE = [page for page in PAGES if "```python" in page.read_text()]
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@pytest.mark.parametrize("page", CODE, ids=lambda page: page.name)
def test_every_python_block_runs_alone(page):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    for name in ("timm", "torchvision", "transformers"):
        if re.search(rf"^(import|from) {name}", "\n".join(blocks), flags=re.MULTILINE):
            framework(name)
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{page.name} block {number}", "exec"), {})


def test_the_readme_links_to_files_that_exist():
    links = re.findall(r"\]\(([^)]+)\)", README.read_text())
    assert links
    assert not [link for link in links if not (ROOT / link).is_file()]


def test_badges_say_what_the_package_requires():
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = next(each for each in project["dependencies"] if each.startswith("torch>="))
    required = [project["requires-python"].removeprefix(">="), torch.removeprefix("torch>=")]
    badges = (DOCS / "pictures" / "badges.svg").read_text()
    assert re.findall(r">([^<>]+)</text>", badges)[1::2] == [*(f"{each}+" for each in required), project["license"]]
    alt = f"![Python {required[0]} or later, PyTorch {required[1]} or later, {project['license']} license]"
    assert all(alt in page.read_text() for page in (README, DOCS / "index.md"))


def test_commands_in_the_text_exist():
    text = "".join(path.read_text() for path in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"))
    modules = set(re.findall(r"python -m ((?:ahop_layers|benchmarks|examples)(?:\.\w+)*)", text))
    files = {module: ROOT / module.replace(".", "/") for module in modules}
    commands = {
        module
        for module, file in files.items()
        for path in (file.with_suffix(".py"), file / "__main__.py")
        if path.is_file()
    }
    assert commands == modules


def test_every_theorem_names_its_tests():
    names = re.findall(r"`(test_\w+)`", (DOCS / "mathematics.md").read_text())
    assert names
    assert all(callable(getattr(test_theorems, name)) for name in names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_what_the_command_writes(page):
    text = page.read_text()
    assert text.count("<!-- made:") == len(pages.PLACE.findall(text))  # each has its end
    assert pages.fill(text, wide=page != README) == text, "the rows have changed: make pages"


def test_every_table_and_plot_has_a_place():
    places = {name for page in PAGES for _, name, _ in pages.PLACE.findall(page.read_text())}
    assert places == {*pages.TABLES, *(f"{name}-picture" for name in pages.DRAWN)}


# The text above each picture of the gallery describes it.
@pytest.mark.parametrize("page", sorted({*DOCS.glob("*.md")} - {DOCS / "gallery.md"}), ids=lambda page: page.name)
def test_pictures_have_captions_of_whole_sentences(page):
    for picture, below in re.findall(
        r"^!\[[^\]]*\]\((\S+)\)\n\n(.*?)\n\n", page.read_text(), flags=re.MULTILINE | re.DOTALL
    ):
        assert re.fullmatch(r"\*[A-Z0-9].*\.( \[.*\)|\n\[.*\))?\*", below, flags=re.DOTALL), f"{picture}: {below}"


def without_names(picture: str) -> str:
    """An SVG without its element ids, which matplotlib derives from rounded numbers."""
    return re.sub(r'(id="|href="#|url\(#)[^")]*', "", picture)


@pytest.mark.parametrize("name", [name for name, picture in pages.DRAWN.items() if picture.rows()])
def test_plots_are_what_the_command_draws(name, tmp_path):
    if f"matplotlib=={version('matplotlib')}\n" not in (DOCS.parent / "constraints.txt").read_text():
        pytest.skip("plots are compared for the matplotlib of constraints.txt only: other versions write other SVG")
    pages.DRAWN[name].draw(pages.DRAWN[name].rows(), tmp_path / "drawn.svg")
    drawn, kept = (
        without_names(path.read_text()) for path in (tmp_path / "drawn.svg", DOCS / "pictures" / f"{name}.svg")
    )
    assert NUMBER.sub("", drawn) == NUMBER.sub("", kept), "the rows have changed: make pages"
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (drawn, kept)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.01)  # the last digits depend on the machine


def test_a_benchmark_without_rows_says_how_to_measure(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    page = pages.fill("".join(f"<!-- made: {name} -->\n<!-- end -->\n" for name in ("tabular", "mil-picture", "bags")))
    assert "To measure it: `python -m benchmarks.paper.tabular`" in page
    assert "To measure it: `python -m benchmarks.paper.mil run`" in page
    assert "![" not in page
    assert pages.fill(page) == page


def test_help_writes_nothing(monkeypatch, capsys):
    monkeypatch.setattr(Path, "write_text", lambda *_: pytest.fail("a page was written"))
    with pytest.raises(SystemExit) as end:
        pages.main(["--help"])
    assert end.value.code == 0
    assert "python -m benchmarks.harness.pages" in capsys.readouterr().out


def test_rows_of_another_device_are_not_mixed_in(monkeypatch):
    rows = pages.rows_of("retrieval.csv")
    kept = pages.retrieval_rows("accuracy")
    others = [{**row, "device": "another", "accuracy": "0"} for row in kept if row["run"] == "0"]
    monkeypatch.setattr(pages, "rows_of", lambda file: [*rows, *others])
    assert pages.retrieval_rows("accuracy") == kept


def test_packed_trials_are_not_shown(monkeypatch):
    row = pages.read(pages.RESULTS / "packed.csv")[0]
    monkeypatch.setattr(pages, "read", lambda path: [row, {**row, "bags": "20"}])
    assert pages.TABLES["packed"]() == pages.part("packed", [row], pages.packed.report)


def test_runs_that_not_all_systems_have_are_left_out(tmp_path, monkeypatch):
    rows = [row for row in pages.rows_of("retrieval.csv") if (row["system"], row["run"]) != ("M-Hop", "4")]
    monkeypatch.setattr(pages, "rows_of", lambda file: rows)
    assert {row["run"] for row in pages.retrieval_rows("accuracy")} == {"0", "1", "2", "3"}


def test_figures_in_the_text_are_in_the_tables():
    """Figures of three digits or more in README and when-does-it-help.md occur in the generated tables."""
    judged = pages.PLACE.sub("", README.read_text() + (DOCS / "when-does-it-help.md").read_text())
    prose = re.sub(r"```.*?```", "", judged, flags=re.DOTALL)
    tables = "".join(path.read_text() for path in FIGURES)
    known = {number for found in re.findall(r"0\.\d{3,}", tables) for number in (found, f"{float(found):.3f}")}
    quoted = set(re.findall(r"0\.\d{3,}", prose)) - {"0.001", "0.012", "0.0003"}  # learning rates, and a difference
    assert quoted
    assert not quoted - known, "figures that are in no table"


def test_corrupted_images_are_compared_seed_by_seed():
    values = {("adaptive", "0"): 0.7, ("adaptive", "1"): 0.6, ("dot", "0"): 0.5, ("dot", "2"): 0.9}
    rows = [
        {"attention": attention, "measure": measure, "seed": seed, "value": str(value)}
        for measure in ("accuracy", "noise 0.1")
        for (attention, seed), value in values.items()
    ]
    lines = images_report.corruption_table(rows).splitlines()
    assert lines[0] == "| corruption | dot (2 seeds) | adaptive (2 seeds) | adaptive minus dot |"
    assert lines[2:] == [f"| {name} | **0.7000** | 0.6500 | +0.2000 |" for name in ("none", "noise 0.1")]


def test_accuracies_by_rate_are_compared_at_equal_and_at_best_rates():
    values = {
        ("dot", "0.001"): (0.2, 0.4),
        ("dot", "3e-05"): (0.6,),
        ("adaptive", "0.001"): (0.5, 0.8),
        ("adaptive:shared", "0.001"): (0.1,),
    }
    rows = [
        {"setup": "paper", "settings": f"cifar10, paper, lr {rate}", "device": "here", "attention": attention}
        | {"measure": "accuracy", "seed": str(seed), "value": str(value)}
        for (attention, rate), several in values.items()
        for seed, value in enumerate(several)
    ]
    lines = images_report.report(rows, ["paper"]).splitlines()
    assert lines[0].endswith("Settings: cifar10, paper; here.")
    assert lines[4:7] == [
        "| dot | **0.6000** | 0.3000 ± 0.1414 |  | 0.5123 |",
        "| adaptive |  | 0.6500 ± 0.2121 | +0.0500 | 0.5637 |",
        "| adaptive:shared |  | 0.1000 | -0.5000 |  |",
    ]
    assert lines[12:14] == ["| adaptive |  | +0.3500 |", "| adaptive:shared |  | -0.1000 |"]
    assert lines[-3:] == ["| dot | 1 | 2 |", "| adaptive |  | 2 |", "| adaptive:shared |  | 1 |"]


def test_a_summary_marks_what_is_better_by_more_than_its_deviation():
    close, far = [0.79, 0.81], [0.69, 0.71]
    assert summary.winner({"dot": far, "adaptive": close}) == "adaptive"
    assert summary.winner({"dot": [0.80, 0.81], "adaptive": close}) is None
    assert summary.winner({"dot": [0.7], "adaptive": [0.6]}) == "dot"
    entries = {"dot": far, "adaptive": close, "gated": [0.9, 0.9], "uniform": far}
    line = summary._line("bags", entries, "dot", "adaptive")
    assert line == [["bags", "0.700", "0.800", "**0.900** gated"]]
    assert summary._line("bags", {"dot": far}, "dot", "adaptive") == []


def test_a_summary_says_which_side_is_faster():
    kernels = [
        {"case": case, "pass": "forward + backward", "paper/ours": ratio, "device": "here"}
        for case, ratio in (("1 x 1, d 1", "0.9"), ("2 x 2, d 64", "25.4"), ("2 x 2, d 64, n 8", "99"))
    ]
    fused = {"attention": "4 blocks", "pass": "training", "part": "eager", "images/s": "40", "sdpa images/s": "50"}
    lines = summary.speed([fused], kernels, [], []).splitlines()[2:]
    assert lines == [
        "| training of a ViT, 4 blocks, images/s | fused dot product | 0.80 x | **fused dot product** |",
        "| full footprints, forward + backward, here | plain PyTorch | 0.90 to 25.4 x | **ours** in 1 of 2 sizes |",
    ]


@pytest.mark.parametrize("page", ["benchmarks-accuracy", "benchmarks-speed", "search", "models"])
def test_pages_of_figures_start_with_a_summary(page):
    text = (DOCS / f"{page}.md").read_text()
    first = pages.PLACE.search(text)
    assert first[2].startswith("summary-")
    assert first[0].count("\n|") > 4
    assert text[: first.start()].count("\n## ") <= 1


def test_the_attention_that_adapts_few_layers_is_not_marked():
    base = {"model": "small", "settings": "224 px", "pass": "training", "part": "eager", "sdpa images/s": "100"}
    rows = [
        base | {"attention": name, "images/s": speed, "MB": ""}
        for name, speed in (("4 blocks", "80"), ("full", "10"), ("last 4", "95"))
    ]
    lines = vit_report.shares(rows, mark=True).splitlines()[2:]
    assert [line.split(" | ")[-1] for line in lines] == ["**0.80** |", "0.10 |", "0.95 |"]


def test_kernels_have_no_empty_columns():
    row = {"case": "2 x 3", "ours_ms": "1.36e+03", "paper/ours": "12.3", "ours/limit": "", "extra_MB": ""}
    text = kernels_report.report([{**row, "pass": "forward"}, {**row, "pass": "forward + backward", "extra_MB": "0.5"}])
    assert text.splitlines()[0].endswith("| forward + backward, speedup | extra memory, MB |")
    assert text.splitlines()[-1] == "| 2 x 3 | 1,360 | 1,360 | 12.3 | 12.3 | 0.5 |"


def test_a_table_in_markdown():
    assert table(["a", "b"], [[1, "x"], [2.5, ""]]) == "| a | b |\n| --- | --- |\n| 1 | x |\n| 2.5 |  |"
