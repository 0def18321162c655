"""The tabular benchmark: data, models of the paper, selection of the best trial, and a small run that is resumed."""

import argparse
import lzma
import re
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_iris

import ahop_layers as ah
from ahop_layers.ops.reference import fold
from benchmarks.harness import rows
from benchmarks.paper.tabular import damaged, small, small_report
from benchmarks.paper.tabular.__main__ import main
from benchmarks.paper.tabular.data import Split, encode, load, read
from benchmarks.paper.tabular.estimator import PaperMemoryClassifier
from benchmarks.paper.tabular.models import MODELS, Context
from benchmarks.paper.tabular.network import Encoding
from benchmarks.paper.tabular.pool import make_pool
from benchmarks.paper.tabular.report import best_trial
from benchmarks.paper.tabular.tables import NAMES
from benchmarks.paper.tabular.training import hold_out

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


def test_the_default_memory_gets_categories():
    pytest.importorskip("pandas")
    random = np.random.default_rng(0)
    X = np.column_stack([random.integers(5, size=200), random.normal(size=200)]).astype(float)
    y = np.isin(X[:, 0], (1, 3)).astype(int)  # not monotone in the code
    context = Context(0, "cpu", np.array([True, False]))
    model = MODELS["adaptive memory"].build({"n_cases": 64}, context).fit(X[::2], y[::2])
    assert model.score(X[1::2], y[1::2]) > 0.95
    assert model[-1].network_.binary.sum() == 5
    frame = model[0].transform(np.array([[4.0, 0.5]]))
    assert frame[0].cat.codes.tolist() == [4]  # as in any other part of the table


def test_the_best_trial_needs_all_trials():
    trials = [{"model": "A-Hop", "number": str(number)} for number in range(2)]
    rows = [
        {**trial, "measure": "cross-validation", "value": value, "chosen": chosen}
        for trial, value, chosen in zip(trials, ("0.7", "0.8"), ('{"a": 1}', '{"a": 2}'), strict=True)
    ]
    assert best_trial(rows, trials) == {"a": 2}
    assert best_trial(rows[:1], trials) is None


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


def small_rows(scores: dict[str, list[float]]) -> list[rows.Row]:
    """Rows of models with some scores on the first tables."""
    stored = []
    for model, values in scores.items():
        for name, value in zip(NAMES, values, strict=False):
            key = {"table": name, "model": model, "seed": "0", "tuned": "0"}
            measures = {"AUC": value, "calibration error": 0.1, "CPU seconds per fit": 1.0}
            stored += [{**key, "measure": measure, "value": str(figure)} for measure, figure in measures.items()]
    return stored


def test_small_tables_are_measured_ranked_and_drawn(tmp_path):
    pytest.importorskip("pandas")
    for tuned in (0, 2):
        found = small.measure(small.Evaluation("iris", "linear model", 0, tuned))
        assert found["AUC"] > 0.98
        assert 0 < found["calibration error"] < 0.3
    found = small.measure(small.Evaluation("diabetes", "nearest neighbors", 0, 0))
    assert list(found) == ["R2", "CPU seconds per fit"]
    probabilities = np.array([[0.95, 0.05]] * 4 + [[0.3, 0.7]] * 2)
    assert small.calibration_error(np.array([0, 0, 0, 1, 1, 0]), probabilities) == pytest.approx((0.8 + 0.4) / 6)
    models = ["adaptive memory", "linear model", "random forest"]
    stored = small_rows({models[0]: [0.9, 0.80001], models[1]: [0.8, 0.8], models[2]: [0.7, 0.7]})
    ranks = small_report.ranks(small_report.means(stored, "AUC"), models)
    assert ranks == dict(zip(models, (1.25, 1.75, 3.0), strict=True))
    assert abs(small_report.critical_difference(5, 30) - 1.1138) < 1e-3  # 2.728 sqrt(5 * 6 / (6 * 30))
    assert small_report._cliques([1.0, 1.5, 2.2, 4.0], 1.0) == [(0, 1), (1, 2)]
    small_report.draw(stored, tmp_path / "ranks.png")
    assert (tmp_path / "ranks.png").stat().st_size > 5000
    text = small_report.report(stored)
    assert "| adaptive memory | **1.25** | **0.100** | +0.000 |" in text
    assert "| random forest | 3.00 | **0.100** | -0.100 |" in text


def test_damage_replaces_a_fraction_of_the_cells():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"size": range(1000), "color": pandas.Categorical(["red", "blue"] * 500)})
    for kind in damaged.KINDS:
        random = np.random.default_rng(0)
        other = damaged.damage(frame, frame, kind, np.full(1000, 0.3), random)
        changed = (other["size"] != frame["size"]).mean()
        assert 0.25 < changed < 0.35
        assert other["color"].dtype == frame["color"].dtype
        assert other["size"].isna().any() == (kind == "missing")
    untouched = damaged.damage(frame, frame, "wrong", np.zeros(1000), np.random.default_rng(0))
    assert untouched.equals(frame)


def test_damaged_tables_are_averaged_over_what_all_models_have(tmp_path):
    stored = []
    for model in damaged.MODELS:
        for training in damaged.TRAININGS:
            for name in ("iris", "wine") if model == damaged.MODELS[0] else ("iris",):
                key = {"table": name, "model": model, "training": training, "fold": "0"}
                values = {
                    f"{kind} AUC {level:g}": 0.9 - level / 2 for kind in damaged.KINDS for level in damaged.LEVELS
                }
                stored += [{**key, "measure": measure, "value": str(value)} for measure, value in values.items()]
    curves, tables, folds = damaged.arrange(stored, "wrong", "AUC")
    assert (len(curves), tables, folds) == (12, 1, 1)
    assert curves["XGBoost", "clean"] == pytest.approx([0.9, 0.85, 0.75, 0.65, 0.55])
    assert "| XGBoost | damaged | **0.900** |" in damaged.report(stored)
    damaged.draw(stored, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


class Division(NamedTuple):
    """A measurement that fails for zero."""

    number: int
    failed: Path

    @property
    def key(self) -> rows.Row:
        return {"number": str(self.number)}

    columns = key


def divide(wanted: Division) -> dict[str, float]:
    if wanted.number == 0:
        wanted.failed.touch()
    while wanted.number > 2 and not wanted.failed.exists():  # a later one never overtakes the failure
        time.sleep(0.01)
    time.sleep(0.2 * (wanted.number > 2))
    return {"value": 1 / wanted.number}


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.full)])
def test_an_error_cancels_what_has_not_started(processes, tmp_path, capsys):
    results = rows.ResultTable(tmp_path / "rows.csv", "cpu")
    options = argparse.Namespace(processes=processes, minutes=1)
    with pytest.raises(ZeroDivisionError), make_pool(options) as pool:
        pool.measure([Division(number, tmp_path / "failed") for number in (2, 0, *range(3, 100))], divide, results)
    assert len(results.rows) < 50
    if processes == 1:
        assert [row["number"] for row in results.rows] == ["2"]
        assert capsys.readouterr().out == "1/99: 2: value 0.5000\n"


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


def test_a_feature_is_a_block_of_its_columns():
    random = np.random.default_rng(0)
    color, size = random.integers(0, 3, 200), random.normal(size=200).round(2)
    rows, labels = np.column_stack([color, np.ones(200), size]), ((color == 1) & (size > 0)).astype(int)
    model = PaperMemoryClassifier(**SMALL, knots=4, embedding_dim=None, blocks="feature").fit(rows, labels)
    network = model.network_
    expected = torch.tensor([0, 0, 1, 2, 2, 2])  # 3 codes have 2 ramps between them, the constant has 1, 4 knots have 3
    assert torch.equal(network.encoding.column, expected)
    distance = -(network.encoding(torch.from_numpy(rows))[:, None] - network.cases).square()
    sums = torch.stack([distance[..., expected == block].sum(-1) for block in range(3)], -1)
    footprints = sums.sort(-1, descending=True).values.cumsum(-1)
    values = network.norm(footprints @ (network.similarity.beta * network.similarity.w[0]))
    outputs = network.mlp[1](network.mlp[0](values).relu()).softmax(-1).detach().numpy()
    np.testing.assert_allclose(model.predict_proba(rows), outputs, rtol=1e-9)


def test_training_stops_early_or_raises():
    rows, labels = load_breast_cancer(return_X_y=True)
    settings = {**SMALL, "max_epochs": 60, "patience": 2}
    history = PaperMemoryClassifier(**settings).fit(rows, labels).history_
    assert len(history) < 60
    assert np.argmin(history) == len(history) - 3  # two epochs without improvement, then it stops
    with pytest.raises(ah.AHopError, match=r"the loss must stay finite, got .* with learning_rate=1e\+30"):
        PaperMemoryClassifier(**{**SMALL, "learning_rate": 1e30}).fit(X, Y)


def test_held_out_rows_are_stratified():
    target = np.repeat([0, 1, 2], [700, 200, 100])
    held = hold_out(target, 0.1, np.random.RandomState(0))
    assert len(set(held)) == 100
    assert np.bincount(target[held]).tolist() == [70, 20, 10]
    assert len(hold_out(target[:99], 0.1, np.random.RandomState(0))) == 0


def test_ramps_are_linear_between_knots_and_have_a_knot_at_each_of_few_values():
    rows = torch.tensor([[0.0, 5.0], [1.0, 5.0], [4.0, 5.0]]).double().repeat(32, 1)
    encoding = Encoding.ramps(rows, torch.ones(96).double(), knots=8)
    assert encoding.column.tolist() == [0, 0, 1]
    columns = encoding(torch.tensor([[0.0, 5.0], [0.5, 7.0], [4.0, 5.0], [9.0, 5.0]]).double()) + encoding.center
    assert columns.tolist() == [[0, 0, 0], [0.5, 0, 0], [1, 1, 0], [1, 1, 0]]
    torch.testing.assert_close(encoding(rows).mean(0), torch.zeros(3))
