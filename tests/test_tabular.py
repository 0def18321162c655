"""The tabular estimators: scikit-learn's own checks, and what they promise beyond them."""

import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OrdinalEncoder, StandardScaler

import ahop_layers as ah
from ahop_layers import tabular
from ahop_layers.ops.reference import fold
from ahop_layers.tabular import AdaptiveMemoryClassifier, AdaptiveMemoryRegressor
from ahop_layers.tabular.network import Encoding
from ahop_layers.tabular.rows import hold_out, merge_rows

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
SMALL = {"n_cases": 16, "hidden": (16,), "max_epochs": 12, "batch_size": 32, "learning_rate": 0.02, "random_state": 0}
X, Y = load_iris(return_X_y=True)

# A process of its own, for two reasons: SciPy reads the variable without which one check is skipped when it is
# imported, and the high-water mark of memory must not be that of earlier tests.
APART = """
import json, resource, sys, warnings
import numpy as np, torch
from sklearn.utils.estimator_checks import check_estimator
from ahop_layers import tabular

warnings.simplefilter("ignore")
torch.set_num_threads(1)
settings = json.loads(sys.argv[1])
settings["hidden"] = tuple(settings["hidden"])
X = np.random.default_rng(0).normal(size=(100_000, 14))
model = tabular.AdaptiveMemoryClassifier(max_epochs=1, random_state=0).fit(X[:2000], X[:2000, 0] > 0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model.predict_proba(X)
print(json.dumps((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024))
for name in tabular.__all__:
    checks = check_estimator(getattr(tabular, name)(**settings), on_fail=None, on_skip=None)
    print(json.dumps([[check["check_name"], check["status"], str(check["exception"])] for check in checks]))
"""


@pytest.fixture(scope="module")
def apart() -> list:
    """Megabytes that a prediction of 100,000 rows takes, then the results of all checks, estimator by estimator."""
    run = subprocess.run(
        [sys.executable, "-c", APART, json.dumps(SMALL)],
        capture_output=True,
        text=True,
        env={**os.environ, "SCIPY_ARRAY_API": "1"},
    )
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(lines) == 3, run.stderr
    return lines


@pytest.fixture(scope="module")
def fitted() -> AdaptiveMemoryClassifier:
    return AdaptiveMemoryClassifier(**SMALL).fit(X, Y)


@pytest.mark.parametrize("number", [1, 2], ids=tabular.__all__)
def test_every_check_of_scikit_learn_passes(apart, number):
    results = apart[number]
    assert len(results) > 50
    assert [result for result in results if result[1] != "passed" and "pandas is not installed" not in result[2]] == []


def test_prediction_memory_is_bounded(apart):
    assert apart[0] < 500


def test_import_of_the_package_leaves_scikit_learn_alone():
    code = "import sys, ahop_layers; print([name for name in sys.modules if name.startswith('sklearn')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize("settings", [
    {}, {"init": "kmeans"}, {"similarity": "dot"}, {"similarity": "kernel"}, {"bases": ("dis", "dot")},
    {"knots": None, "embedding_dim": None, "n_cases": 64}, {"loss": "squared"},
], ids=str)  # fmt: skip
def test_every_form_learns(settings):
    model = AdaptiveMemoryClassifier(**{**SMALL, "max_epochs": 25, **settings}).fit(X, Y)
    assert model.score(X, Y) > 0.9
    probabilities = model.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    assert (model.classes_[probabilities.argmax(1)] == model.predict(X)).all()


@pytest.mark.parametrize("loss", ["squared", "absolute"])
def test_regression_beats_the_mean(loss):
    rows, target = load_diabetes(return_X_y=True)
    model = AdaptiveMemoryRegressor(**{**SMALL, "knots": None, "max_epochs": 30}, loss=loss).fit(
        rows[:350], target[:350]
    )
    assert model.score(rows[350:], target[350:]) > 0.35


def test_a_weight_is_a_repetition_and_order_does_not_matter():
    weight = np.random.default_rng(0).integers(0, 4, len(X))
    order = np.random.default_rng(1).permutation(len(X))
    weighted = AdaptiveMemoryClassifier(**SMALL).fit(X[order], Y[order], sample_weight=weight[order])
    repeated = AdaptiveMemoryClassifier(**SMALL).fit(X.repeat(weight, axis=0), Y.repeat(weight))
    assert np.array_equal(weighted.predict_proba(X), repeated.predict_proba(X))


def test_a_class_without_weight_is_no_class():
    model = AdaptiveMemoryClassifier(**SMALL).fit(X, Y, sample_weight=Y != 1)
    assert model.classes_.tolist() == [0, 2]
    assert model.decision_function(X).shape == (150,)


def test_the_seed_decides_everything_and_leaves_the_global_one_alone(fitted):
    state, onednn = torch.get_rng_state(), torch.backends.mkldnn.enabled
    again = AdaptiveMemoryClassifier(**SMALL).fit(X, Y)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.backends.mkldnn.enabled == onednn
    assert np.array_equal(again.predict_proba(X), fitted.predict_proba(X))
    other = AdaptiveMemoryClassifier(**{**SMALL, "random_state": 1}).fit(X, Y)
    assert not np.array_equal(other.predict_proba(X), fitted.predict_proba(X))


def test_nearest_cases_are_training_rows_with_the_largest_weights(fitted):
    cases, weights = fitted.nearest_cases(X[:7], n_nearest=16)
    assert (np.diff(weights, axis=1) <= 0).all()
    np.testing.assert_allclose(weights.sum(1), 1)
    assert np.array_equal(fitted.cases_, X[fitted.case_indices_])
    assert np.array_equal(fitted.case_targets_, Y[fitted.case_indices_])
    scores = fitted.network_.scores(torch.from_numpy(X[:7])).detach().numpy()
    assert (cases[:, 0] == scores.argmax(1)).all()
    own = fitted.nearest_cases(fitted.cases_, 1)[0][:, 0]  # under a distance a case is nearest to itself
    assert (fitted.cases_[own] == fitted.cases_).all(1).mean() > 0.9
    with pytest.raises(ah.AHopError, match="between 1 and the 16 cases, got 17"):
        fitted.nearest_cases(X, 17)


def test_a_fitted_similarity_is_one_like_all_others(fitted):
    """Trained in its folded form, and left in the form that plots and other tools know."""
    similarity = fitted.network_.similarity
    assert isinstance(similarity, ah.AdaptiveSimilarity)
    assert type(similarity.w) is torch.nn.Parameter
    assert (fold(similarity.w).diff() != 0).any()  # it has learned: the first base alone weighs all dimensions alike


def test_pickle_joblib_and_clone(fitted):
    file = io.BytesIO()
    joblib.dump(fitted, file)
    file.seek(0)
    for copy in (pickle.loads(pickle.dumps(fitted)), joblib.load(file)):
        assert np.array_equal(copy.predict_proba(X), fitted.predict_proba(X))
    assert not hasattr(clone(fitted), "classes_")


def test_pipelines_and_searches():
    rows = np.column_stack([X.astype(object), np.where(X[:, 0] > 5.8, "long", "short")])
    columns = ColumnTransformer([("words", OrdinalEncoder(), [4])], remainder=StandardScaler())
    model = make_pipeline(columns, AdaptiveMemoryClassifier(**SMALL))
    assert cross_val_score(model, rows, Y, cv=3).mean() > 0.8
    search = GridSearchCV(model, {"adaptivememoryclassifier__n_cases": [8, 16]}, cv=2, n_jobs=2).fit(rows, Y)
    assert search.best_params_["adaptivememoryclassifier__n_cases"] in (8, 16)


def test_a_constant_feature_says_nothing_whatever_its_value():
    rows = np.random.default_rng(0).normal(size=(1000, 2))
    labels = rows.sum(1) > 0
    constant = np.full((1000, 1), 0.1)
    model = AdaptiveMemoryClassifier(**SMALL, knots=None).fit(np.hstack([rows, constant]), labels)
    expected = model.predict_proba(np.hstack([rows, constant]))
    np.testing.assert_array_equal(model.predict_proba(np.hstack([rows, constant + 5])), expected)


def test_whole_numbers_of_numpy():
    settings = {**SMALL, "n_cases": np.int64(16), "batch_size": np.int64(32), "max_epochs": np.int64(2)}
    assert AdaptiveMemoryClassifier(**settings).fit(X, Y).score(X, Y) > 0.5


def test_pandas_in():
    pandas = pytest.importorskip("pandas")
    frame, labels = pandas.DataFrame(X, columns=list("abcd")), pandas.Series(Y).map({0: "x", 1: "y", 2: "z"})
    model = AdaptiveMemoryClassifier(**SMALL).fit(frame, labels)
    assert model.feature_names_in_.tolist() == list("abcd")
    assert set(model.predict(frame)) <= {"x", "y", "z"}
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[list("badc")])


@pytest.mark.parametrize(("rows", "labels", "message"), [
    (np.where(X > 7, np.nan, X), Y, "contains NaN"),
    (X, np.zeros(150), "one class"),
    (X.astype(str).astype(object) + "a", Y, "could not convert string to float"),
    (X[:0], Y[:0], "0 sample"),
    (X, Y[:-1], "inconsistent numbers of samples"),
], ids=["nan", "one class", "strings", "empty", "lengths"])  # fmt: skip
def test_bad_rows_get_the_usual_errors(rows, labels, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveMemoryClassifier(**SMALL).fit(rows, labels)


def test_a_wrong_number_of_features(fitted):
    with pytest.raises(ValueError, match="X has 3 features, but AdaptiveMemoryClassifier is expecting 4"):
        fitted.predict(X[:, :3])


@pytest.mark.parametrize(("settings", "message"), [
    ({"n_cases": 0}, "n_cases must be a whole number of at least 1, got 0"),
    ({"knots": 1}, "knots must be a whole number of at least 2, got 1"),
    ({"similarity": "cosine"}, "similarity must be one of adaptive, dot, kernel, got 'cosine'"),
    ({"init": "centre"}, "init must be one of rows, kmeans, got 'centre'"),
    ({"loss": "hinge"}, "loss must be one of auto, log, squared, got 'hinge'"),
    ({"learning_rate": 0}, "learning_rate must be positive, got 0"),
    ({"validation_fraction": 1.0}, "validation_fraction must be at least 0 and below 1, got 1.0"),
], ids=str)  # fmt: skip
def test_bad_parameters(settings, message):
    with pytest.raises(ah.AHopError, match=message):
        AdaptiveMemoryClassifier(**{**SMALL, **settings}).fit(X, Y)


def test_bad_weights():
    for weight in (np.zeros(150), -np.ones(150), np.ones((150, 2))):
        with pytest.raises(ah.AHopError, match="sample_weight must be one number for each row"):
            AdaptiveMemoryClassifier(**SMALL).fit(X, Y, sample_weight=weight)


def test_fitting_in_parts_is_refused(fitted):
    assert not hasattr(fitted, "partial_fit")
    with pytest.raises(AttributeError, match=r"cannot be fitted in parts, .* use fit"):
        fitted.partial_fit(X, Y)


def test_verbose_and_early_stopping(capsys):
    rows, labels = load_breast_cancer(return_X_y=True)
    model = AdaptiveMemoryClassifier(**{**SMALL, "max_epochs": 60}, patience=2, verbose=True).fit(rows, labels)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(model.history_) < 60
    assert "held out" in lines[0]
    assert np.argmin(model.history_) == len(model.history_) - 3  # two epochs without a better one, then the end


def test_held_out_rows_are_spread_over_the_classes():
    target = np.repeat([0, 1, 2], [700, 200, 100])
    held = hold_out(target, 0.1, np.random.RandomState(0))
    assert len(set(held)) == 100
    assert np.bincount(target[held]).tolist() == [70, 20, 10]
    assert len(hold_out(target[:99], 0.1, np.random.RandomState(0))) == 0


def test_merged_rows():
    rows = merge_rows(np.array([[2.0], [1.0], [2.0], [3.0]]), np.array([0, 1, 0, 1]), [1, 2, 3, 0])
    assert rows.X.tolist() == [[2], [1]]
    assert rows.target.tolist() == [0, 1]
    assert rows.place.tolist() == [0, 1]
    np.testing.assert_allclose(rows.weight, [4 / 3, 2 / 3])


def test_ramps_are_a_table_of_few_values_and_linear_between_knots():
    rows = torch.tensor([[0.0, 5.0], [1.0, 5.0], [4.0, 5.0]]).double().repeat(32, 1)
    encoding = Encoding.ramps(rows, torch.ones(96).double(), knots=8)
    assert encoding.column.tolist() == [0, 0, 1]
    columns = encoding(torch.tensor([[0.0, 5.0], [0.5, 7.0], [4.0, 5.0], [9.0, 5.0]]).double()) + encoding.centre
    assert columns.tolist() == [[0, 0, 0], [0.5, 0, 0], [1, 1, 0], [1, 1, 0]]
    torch.testing.assert_close(encoding(rows).mean(0), torch.zeros(3))
