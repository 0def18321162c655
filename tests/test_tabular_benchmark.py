"""The tabular benchmark: data, selection of the best trial, and a small run that is stopped and resumed."""

import lzma
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import rows
from benchmarks.paper.figures import TABULAR
from benchmarks.paper.tabular.__main__ import main
from benchmarks.paper.tabular.data import SETS, Split, encode, load, read
from benchmarks.paper.tabular.models import MODELS
from benchmarks.paper.tabular.report import best_trial

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PROGRAM = [sys.executable, "-m", "benchmarks.paper.tabular"]


def test_text_and_missing_values_are_encoded(tmp_path):
    with lzma.open(tmp_path / "table.xz", "wt") as file:
        file.write("|a comment\n1.5;red;2\n\n;;3\n2; blue;3\n")
    X, categories = encode(list(zip(*read(tmp_path / "table.xz", ";"), strict=True)))
    assert X.tolist() == [[1.5, 2, 2], [-1, 0, 3], [2, 1, 3]]
    assert categories.tolist() == [False, True, False]


def test_a_published_test_part_is_kept_and_rows_limit_the_training_part(tmp_path):
    (tmp_path / "tabular").mkdir()
    for name, count in (("data", 100), ("test", 30)):
        with lzma.open(tmp_path / "tabular" / f"adult.{name}.xz", "wt") as file:
            file.writelines(f"{age}, Private, {'>50K' if age % 4 == 0 else '<=50K'}\n" for age in range(count))
    split = load("adult", tmp_path, seed=0, rows=40)
    assert split.X.shape == (40, 2)
    assert split.test_X[:, 0].tolist() == list(range(30))
    assert split.y.mean() == 0.25
    assert split.measure == "accuracy"
    assert Split(split.X, split.y * 0, split.test_X, split.test_y, split.categories).measure == "roc_auc"


def test_missing_files_are_named_before_anything_is_measured(tmp_path):
    command = ["--sets", "bank", "--models", "M-Hop", "--device", "cpu"]
    paths = ["--data-dir", str(tmp_path), "--output", str(tmp_path / "rows.csv")]
    done = subprocess.run([*PROGRAM, *command, *paths], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"expected the data set bank in {tmp_path}/tabular/bank-full.csv.xz, got no such file" in done.stderr
    assert "docs/data.md" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_data_page_lists_every_file():
    page = (ROOT / "docs" / "data.md").read_text()
    files = [file for _, files in SETS.values() for file in files]
    assert len(files) == 7
    assert [file for file in files if f"`{file}`" not in page] == []


def test_every_model_but_one_has_the_figures_of_the_paper():
    assert set(TABULAR) == set(SETS)
    assert all(set(MODELS) - set(reported) == {"HistGradientBoosting"} for reported in TABULAR.values())
    for name in ("M-Hop", "K2-Hop"):
        assert all(reported["A-Hop"] > reported[name] for reported in TABULAR.values())


def test_the_best_trial_needs_all_trials():
    trials = [{"model": "A-Hop", "number": str(number)} for number in range(2)]
    rows = [
        {**trial, "measure": "cross-validation", "value": value, "chosen": chosen}
        for trial, value, chosen in zip(trials, ("0.7", "0.8"), ('{"a": 1}', '{"a": 2}'), strict=True)
    ]
    assert best_trial(rows, trials) == {"a": 2}
    assert best_trial(rows[:1], trials) is None


def test_a_stopped_run_resumes_and_prints_a_table(tmp_path, monkeypatch, capsys):
    output = tmp_path / "rows.csv"
    command = ["tabular", "--quick", "--models", "M-Hop", "A-Hop", "--output", str(output)]

    def run(*more: str) -> str:
        monkeypatch.setattr(sys, "argv", [*command, *more])
        main()
        return capsys.readouterr().out

    assert "the same command resumes here" in run("--minutes", "0")
    first = rows.read(output)
    assert {row["kind"] for row in first} == {"trial"}
    text = run()
    stored = rows.read(output)
    assert stored[: len(first)] == first
    # For each of two models: two trials with two measures, two runs with three.
    assert len(stored) == 2 * (2 * 2 + 2 * 3)
    assert all(row["torch"] and row["device"] and row["commit"] for row in stored)
    assert len(re.findall(r"\| 2 \| 2 \| \*{0,2}0\.9", text)) == 2  # trials, runs, accuracy
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]
