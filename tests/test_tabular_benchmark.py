"""The tabular benchmark: the network of the paper, and a small run."""

import re
import sys

import pytest
import torch
from sklearn.datasets import load_iris

from ahop_layers.ops.reference import fold
from benchmarks.harness import rows
from benchmarks.paper.tabular.__main__ import main
from benchmarks.paper.tabular.estimator import PaperMemoryClassifier

pytestmark = pytest.mark.slow


@pytest.mark.full
def test_a_run_prints_a_table(tmp_path, monkeypatch, capsys):
    output = tmp_path / "rows.csv"
    monkeypatch.setattr(sys, "argv", ["tabular", "--quick", "--models", "M-Hop", "A-Hop", "--output", str(output)])
    main()
    # For each of two models: two trials with two measures, two runs with three.
    assert len(rows.read(output)) == 2 * (2 * 2 + 2 * 3)
    assert len(re.findall(r"\| \*{0,2}0\.9\d+ ± ", capsys.readouterr().out)) == 2  # accuracies of two runs


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
    if similarity := model.network_.similarity:
        assert type(next(similarity.parameters())) is torch.nn.Parameter  # no longer parametrized
        assert (fold(similarity.w).diff() != 0).any()  # constant at first
