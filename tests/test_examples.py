"""Every example runs as a copy in an empty folder, prints its table and draws what it says; serve is in test_serve."""

import ast
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from examples import demo, hopfield, mil, repair, search, vit

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EXAMPLES = {path.stem: path for path in (ROOT / "examples").glob("*.py") if path.stem != "__init__"}
MODULES = {module.__name__.rpartition(".")[2]: module for module in (demo, hopfield, mil, repair, search, vit)}
RUNS = {  # example -> arguments of a short run, a line that it prints, and the pictures that it writes
    "hopfield": (
        "--bags 64 --epochs 1",
        r"outputs differ after the switch +(0\.0e\+00|\d\.\de-(0[7-9]|1\d))",
        ["hopfield"],
    ),
    "mil": ("--fast-dev-run", r"adaptive +[01]\.\d{4}", ["adaptive/roc", "adaptive/instances"]),
    "repair": ("--steps 100", r"replaced, with ah\.Repair +0\.\d{3}", ["repair", "accuracy"]),
    "search": ("--patterns 60 --seeds 1", r"70% +[01]\.\d{3} +[01]\.\d{3} +[01]\.\d{3}", ["search"]),
    "vit": ("--fast-dev-run", r"adaptive +[01]\.\d{4}", ["dot/confusion", "adaptive/maps", "adaptive/weights"]),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_copy_runs_alone(name, tmp_path, monkeypatch, capsys, small_fit):
    arguments, line, pictures = RUNS[name]
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLES[name], tmp_path)
    for hidden in ("examples", "benchmarks", "tests"):  # importing them raises
        monkeypatch.setitem(sys.modules, hidden, None)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments.split()])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))  # hopfield.py installs its layers as hflayers
    runpy.run_path(f"{name}.py", run_name="__main__")
    assert re.search(rf"^{line}", capsys.readouterr().out, flags=re.MULTILINE)
    drawn = {str(path.relative_to(f"out/{name}").with_suffix("")) for path in Path("out").rglob("*.png")}
    assert drawn >= set(pictures)
    for picture in drawn:
        assert imread(f"out/{name}/{picture}.png").std() > 0.01  # not blank
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.py", "out"}


@pytest.mark.full
def test_demo(tmp_path, capsys, small_fit):
    demo.main(["--quick", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "largest change of a logit by conversion" in shown
    listed = shown.partition("\npictures:")[2].split()[: len(demo.PICTURES)]
    assert len(demo.PICTURES) <= 5
    assert min(imread(picture).std() for picture in listed) > 0.01  # not blank


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_needs_the_public_package_and_itself(name):
    text = EXAMPLES[name].read_text()
    assert "\nTo run: " in ast.get_docstring(ast.parse(text))
    assert len(text.splitlines()) <= {"mil": 300, "vit": 300, "serve": 230}.get(name, 150)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            assert not {module.partition(".")[0] for module in modules} & {"benchmarks", "tests"}
            assert name == "demo" or not any(module.startswith("examples") for module in modules)
            assert not [each.name for each in node.names if each.name.startswith("_")]


def test_commands_of_the_index_and_the_pages_are_valid():
    text = "\n".join(page.read_text() for page in (ROOT / "examples" / "README.md", *(ROOT / "docs").glob("*.md")))
    found = re.findall(r"(?:`|^)python -m examples\.([^`\n]+)", text, flags=re.MULTILINE)
    assert {shlex.split(line)[0] for line in found} == EXAMPLES.keys()
    for name, *arguments in (shlex.split(line) for line in found if not line.startswith("serve ")):
        with pytest.raises(SystemExit) as end:
            MODULES[name].main([*arguments, "--help"])
        assert end.value.code == 0


def test_search_finds_more_and_draws_its_answers(tmp_path, monkeypatch, small_fit):
    monkeypatch.setattr(search, "LEVELS", (0.5, 0.7))
    found = search.main(["--patterns", "100", "--seeds", "1", "--out", str(tmp_path)])
    assert all(len(values[level]) == 1 for values in found.values() for level in search.LEVELS)
    assert min(found["adaptive"][0.7]) > 0.95 > 0.8 > max(found["L1"][0.7])
    digits, right = torch.rand(14, 64), torch.arange(14) % 2 == 0
    axes = search.draw([("query", digits, None), ("answer", digits, right)]).axes
    assert [[text.get_text() for text in axis.texts] for axis in axes[13:16]] == [[], ["\u2713"], ["\u2717"]]
    for axis, digit in zip(axes[14:], digits, strict=True):
        assert torch.equal(torch.from_numpy(axis.images[0].get_array().data).flatten(), digit)


def test_repair_keeps_what_the_network_reads(tmp_path, small_fit):
    found = repair.main(["--out", str(tmp_path)])
    for kind, gain in (("replaced", 0.15), ("missing", -0.02)):
        alone, repaired = (found[f"{kind}, {name}"] for name in ("network alone", "with ah.Repair"))
        assert repaired[0] > alone[0] - 0.02
        assert min(repaired[at] - alone[at] for at in (2, 3, 4)) > gain
        assert repaired[2] > 0.9


def test_a_switched_model_computes_the_same_and_learns(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    found = hopfield.main(["--bags", "128", "--epochs", "2", "--out", str(tmp_path)])
    assert all(value <= 1e-5 for name, value in found.items() if "differ" in name)
    saved = torch.load(tmp_path / "hopfield.pt", weights_only=True)
    changed = [name for name, value in saved.items() if name.endswith("similarity.w") and value[..., 1:, -1].std() > 0]
    assert changed  # of the learned similarity


@pytest.mark.parametrize(("name", "arguments", "message"), [
    ("mil", "--data csv --data-dir nowhere.csv", r"No such file or directory: 'nowhere\.csv'"),
    ("vit", "--data-dir nowhere", r"expected images \(\.png .* in nowhere/train/<class>, got none"),
    ("vit", "--patch 3", "patch must divide the side of an image, got patch 3 and side 8"),
    ("vit", "--convert nowhere.ckpt", r"expected a checkpoint of this model, got nowhere\.ckpt \("),
    ("search", "--patterns many", "argument --patterns: invalid int value: 'many'"),
])  # fmt: skip
def test_a_mistake_ends_in_one_line(name, arguments, message, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    assert re.search(f"error: .*{message}", refused(MODULES[name].main, *arguments.split(), usage=name != "mil"))
    assert not list(tmp_path.iterdir())
