"""The tabular benchmark: data, the network of the paper, and a small run that is resumed."""

import lzma
import re
import sys

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_iris

import ahop_layers as ah
from ahop_layers.ops.reference import fold
from benchmarks.harness import rows
from benchmarks.paper.tabular.__main__ import main
from benchmarks.paper.tabular.data import Split, encode, load, read
from benchmarks.paper.tabular.estimator import PaperMemoryClassifier
from benchmarks.paper.tabular.network import Encoding

pytestmark = pytest.mark.slow


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


@pytest.mark.full
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


SMALL = {"n_cases": 16, "hidden": (16,), "max_epochs": 12, "batch_size": 32, "learning_rate": 0.02, "random_state": 0}
X, Y = load_iris(return_X_y=True)


@pytest.mark.parametrize("settings", [
    {}, {"similarity": "dot"}, {"similarity": "kernel", "init": "kmeans"}, {"blocks": 4},
    {"bases": ("dis", "dot"), "knots": None, "embedding_dim": None, "n_cases": 64, "loss": "squared"},
], ids=str)  # fmt: skip
def test_every_form_learns(settings):
    labels = Y == 0  # a class with a gap to the others
    model = PaperMemoryClassifier(**{**SMALL, **settings}).fit(X, labels)
    assert model.score(X, labels) > 0.95
    state = torch.manual_seed(1).get_state()
    assert np.array_equal(clone(model).fit(X, labels).predict_proba(X), model.predict_proba(X))
    assert torch.equal(torch.get_rng_state(), state)
    if similarity := model.network_.similarity:
        assert type(next(similarity.parameters())) is torch.nn.Parameter  # no longer parametrized
        assert (fold(similarity.w).diff() != 0).any()  # constant at first


def test_training_stops_early_or_raises():
    rows, labels = load_breast_cancer(return_X_y=True)
    settings = {**SMALL, "max_epochs": 60, "patience": 2}
    history = PaperMemoryClassifier(**settings).fit(rows, labels).history_
    assert len(history) < 60
    assert np.argmin(history) == len(history) - 3  # two epochs without improvement, then it stops
    with pytest.raises(ah.AHopError, match=r"the loss must stay finite, got .* with learning_rate=1e\+30"):
        PaperMemoryClassifier(**{**SMALL, "learning_rate": 1e30}).fit(X, Y)


def test_ramps_are_linear_between_knots_and_have_a_knot_at_each_of_few_values():
    rows = torch.tensor([[0.0, 5.0], [1.0, 5.0], [4.0, 5.0]]).double().repeat(32, 1)
    encoding = Encoding.ramps(rows, torch.ones(96).double(), knots=8)
    assert encoding.column.tolist() == [0, 0, 1]
    columns = encoding(torch.tensor([[0.0, 5.0], [0.5, 7.0], [4.0, 5.0], [9.0, 5.0]]).double()) + encoding.center
    assert columns.tolist() == [[0, 0, 0], [0.5, 0, 0], [1, 1, 0], [1, 1, 0]]
    torch.testing.assert_close(encoding(rows).mean(0), torch.zeros(3))
