"""The estimators for tables: scikit-learn's own checks, and properties beyond them."""

import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from unittest import SkipTest

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris, make_friedman1
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import RidgeCV
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

import ahop_layers as ah
from ahop_layers.tabular import AdaptiveMemoryClassifier, AdaptiveMemoryRegressor, projection
from tests.samples import refuses

pytestmark = pytest.mark.slow
X, Y = load_iris(return_X_y=True)
ROWS, TARGET = load_diabetes(return_X_y=True)


@pytest.fixture(scope="module")
def fitted() -> AdaptiveMemoryClassifier:
    return AdaptiveMemoryClassifier(random_state=0).fit(X[::2], Y[::2])


@pytest.fixture(scope="module")
def cancer() -> tuple[AdaptiveMemoryClassifier, np.ndarray, np.ndarray]:
    """A classifier that was fitted with the defaults, and rows and labels that it has not seen."""
    rows, labels = load_breast_cancer(return_X_y=True)
    return AdaptiveMemoryClassifier(random_state=0).fit(rows[::2], labels[::2]), rows[1::2], labels[1::2]


@pytest.fixture
def few_steps(monkeypatch):
    """Fits in 5 steps instead of 40, for tests that ask for no accuracy."""
    monkeypatch.setattr(projection, "SMALL", projection.SMALL._replace(steps=5))


@pytest.mark.recorded  # scikit-learn asks for accuracies on data of its own seeds
@pytest.mark.filterwarnings("ignore")
def test_checks_of_scikit_learn_pass(few_steps):
    checks = list(estimator_checks_generator(AdaptiveMemoryClassifier()))
    assert len(checks) > 50
    for estimator, check in checks[::5]:  # make test-all has every check of every estimator
        with suppress(SkipTest):
            check(estimator)


@pytest.mark.full
@pytest.mark.recorded
@pytest.mark.parametrize("estimator", [
    "AdaptiveMemoryClassifier()",
    "AdaptiveMemoryRegressor()",
    "AdaptiveNeighborsClassifier(epochs=10, batch_size=64, random_state=0)",
    "AdaptiveNeighborsRegressor(random_state=0)",
])  # fmt: skip
def test_every_check_of_scikit_learn_passes(estimator):
    code = f"""
import json, torch, warnings
from ahop_layers.tabular import *
from sklearn.utils.estimator_checks import check_estimator
torch.set_num_threads(1)
warnings.simplefilter("ignore")
checks = check_estimator({estimator}, on_fail=None, on_skip=None)
print(json.dumps([[check["check_name"], check["status"], str(check["exception"])] for check in checks]))
"""
    # SciPy reads SCIPY_ARRAY_API, without which one check is skipped, at import: in a process of its own.
    environment = {**os.environ, "SCIPY_ARRAY_API": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) > 50
    assert [result for result in results if result[1] != "passed" and "pandas is not installed" not in result[2]] == []


def test_rows_are_predicted_in_chunks(fitted):
    """The memory of a prediction is bounded: a matrix of scores has at most 2^20 entries."""
    sizes: list[int] = []
    hook = fitted.network_.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    fitted.predict_proba(np.tile(X, (200, 1)))
    hook.remove()
    assert sum(sizes) == 30_000
    assert max(sizes) * len(fitted.cases_) <= 2**20


def test_defaults_are_not_below_linear_models_and_forests(cancer):
    model = AdaptiveMemoryRegressor(random_state=0).fit(ROWS[::2], TARGET[::2])
    linear = RidgeCV(alphas=np.logspace(-3, 3, 7)).fit(StandardScaler().fit_transform(ROWS)[::2], TARGET[::2])
    other = linear.score(StandardScaler().fit_transform(ROWS)[1::2], TARGET[1::2])
    assert model.score(ROWS[1::2], TARGET[1::2]) > other - 0.03
    classifier, tested, truth = cancer
    rows, labels = load_breast_cancer(return_X_y=True)
    forest = RandomForestClassifier(random_state=0).fit(rows[::2], labels[::2])
    areas = [roc_auc_score(truth, each.predict_proba(tested)[:, 1]) for each in (classifier, forest)]
    assert areas[0] > areas[1] - 0.02


def test_units_of_columns_and_targets_change_nothing(few_steps):
    scale, shift = np.logspace(-6, 6, 10), np.linspace(-100, 100, 10)
    model = AdaptiveMemoryRegressor(random_state=0).fit(ROWS[::2], TARGET[::2])
    other = AdaptiveMemoryRegressor(random_state=0).fit(scale * (ROWS[::2] + shift), 1e4 * TARGET[::2] - 7)
    expected = model.predict(ROWS)
    np.testing.assert_allclose((other.predict(scale * (ROWS + shift)) + 7) / 1e4, expected, rtol=1e-5)


def test_training_on_damage_helps_with_wrong_cells(cancer):
    plain, tested, truth = cancer
    rows, labels = load_breast_cancer(return_X_y=True)
    random = np.random.default_rng(0)
    queries = np.where(random.random(tested.shape) < 0.6, random.permuted(tested, axis=0), tested)
    robust = AdaptiveMemoryClassifier(damage=0.5, random_state=0).fit(rows[::2], labels[::2])
    areas = [roc_auc_score(truth, each.predict_proba(queries)[:, 1]) for each in (plain, robust)]
    assert areas[1] > areas[0]


def words(count: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a color, a size with missing values and a number, and labels that need color and size."""
    random = np.random.default_rng(0)
    color, size = random.choice(["red", "green", "blue"], count), random.normal(size=count)
    labels = np.where((color == "green") & (size > -0.5), "yes", "no")
    size[random.random(count) < 0.1] = np.nan
    return np.column_stack([color.astype(object), size, random.normal(size=count)]), labels


def test_categories_and_missing_values():
    rows, labels = words()
    model = AdaptiveMemoryClassifier(random_state=0).fit(rows[::2], labels[::2])
    assert model.score(rows[1::2], labels[1::2]) > 0.85
    assert model.feature_weights_.shape == (3,)
    unknown = np.array([["purple", 0.3, 0.0], [None, 0.3, 0.0], ["green", np.nan, np.nan]], dtype=object)
    probabilities = model.predict_proba(unknown)
    assert np.isfinite(probabilities).all()
    np.testing.assert_allclose(probabilities[0], probabilities[1])  # no training row lacks a color
    np.testing.assert_array_equal(model.predict_proba(unknown.tolist()), probabilities)
    copy = pickle.loads(pickle.dumps(model))
    assert np.array_equal(copy.predict_proba(rows), model.predict_proba(rows))


def test_strings_are_not_read_as_numbers():
    codes = np.array(["001", "01", "1", "1.0"] * 10)
    for rows in (codes[:, None], codes[:, None].astype(object), np.column_stack([codes, codes[::-1]])):
        assert AdaptiveMemoryClassifier(random_state=0).fit(rows, codes).score(rows, codes) == 1


def test_categories_of_another_type_are_refused(few_steps, fitted):
    refuses("feature 1 was numeric in fit, got 'a'", fitted.predict, np.array([[1.0, "a", 2.0, 3.0]], dtype=object))
    with pytest.raises(TypeError, match="argument must be a string or a number"):
        fitted.predict(np.array([[1.0, {}, 2.0, 3.0]], dtype=object))
    codes = np.repeat([1, 2, 3, 4], 10)[:, None]
    labels = codes[:, 0] % 2
    model = AdaptiveMemoryClassifier(random_state=0).fit(codes.astype(str), labels)
    for rows in (codes, codes.astype(object)):
        refuses(r"feature 0 must have categories like '1', got \d", model.predict, rows)
    assert model.predict_proba([[None], ["5"]]).shape == (2, 2)
    numeric = AdaptiveMemoryClassifier(random_state=0).fit(codes, labels)
    refuses("feature 0 was numeric in fit, got '1'", numeric.predict, codes.astype(str))
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"code": pandas.Categorical(codes[:, 0])})
    np.testing.assert_array_equal(numeric.predict_proba(frame.to_numpy()), numeric.predict_proba(codes))
    model = AdaptiveMemoryClassifier(random_state=0).fit(frame, labels)
    for kind in (int, float, object):  # equal numbers
        other = pandas.DataFrame({"code": codes[:, 0].astype(kind)})
        np.testing.assert_array_equal(model.predict_proba(other), model.predict_proba(frame))
    refuses("feature 0 must have categories like 1, got '1'", model.predict, pandas.DataFrame({"code": ["1"]}))


def test_data_frames_keep_the_order_of_columns_and_categories(few_steps):
    pandas = pytest.importorskip("pandas")
    rows, labels = words()
    frame = pandas.DataFrame(rows, columns=["color", "size", "number"])
    frame["color"] = frame["color"].astype("category")
    frame[["size", "number"]] = frame[["size", "number"]].astype(float)
    model = AdaptiveMemoryClassifier(random_state=0).fit(frame, pandas.Series(labels))
    assert model.feature_names_in_.tolist() == ["color", "size", "number"]
    expected = AdaptiveMemoryClassifier(random_state=0).fit(rows, labels).predict_proba(rows)
    assert np.array_equal(model.predict_proba(frame), expected)
    assert np.array_equal(model.predict_proba(frame.astype({"color": object})), expected)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["size", "color", "number"]])
    with pytest.raises(ValueError, match=r"2-dimensional container but got .*Series"):
        model.predict(frame["number"])


def test_a_weight_is_a_repetition_and_order_does_not_matter(few_steps):
    rows = np.where(X > 6.5, np.nan, X)  # missing values are equal
    weight = np.random.default_rng(0).integers(0, 4, len(X))
    order = np.random.default_rng(1).permutation(len(X))
    weighted = AdaptiveMemoryClassifier(random_state=0).fit(rows[order], Y[order], sample_weight=weight[order])
    repeated = AdaptiveMemoryClassifier(random_state=0).fit(rows.repeat(weight, axis=0), Y.repeat(weight))
    assert np.array_equal(weighted.predict_proba(rows), repeated.predict_proba(rows))


def test_labels_of_rows_with_zero_weight_are_not_classes(few_steps):
    model = AdaptiveMemoryClassifier(random_state=0).fit(X, Y, sample_weight=Y != 1)
    assert model.classes_.tolist() == [0, 2]
    assert model.decision_function(X).shape == (150,)


def test_weights_of_classes(few_steps):
    labels = (Y == 2).astype(int)
    rows = X[:, :1]
    plain, balanced, same = (
        AdaptiveMemoryClassifier(class_weight=weight, random_state=0).fit(rows, labels)
        for weight in (None, "balanced", {0: 0.5, 1: 1.0})
    )
    assert balanced.predict_proba(rows)[:, 1].mean() > plain.predict_proba(rows)[:, 1].mean() + 0.02
    np.testing.assert_allclose(balanced.predict_proba(rows), same.predict_proba(rows), rtol=1e-6)


def test_probabilities_are_calibrated(fitted, cancer):
    """The mean log loss of unseen rows is smaller than that of twice as sure and of half as sure predictions."""
    model, rows, labels = cancer
    odds = model.decision_function(rows)
    losses = [np.logaddexp(0, -factor * odds * (2 * labels - 1)).mean() for factor in (0.5, 1, 2)]
    assert losses[1] < min(losses[0], losses[2])
    probabilities = fitted.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    assert (fitted.classes_[probabilities.argmax(1)] == fitted.predict(X)).all()


def test_the_seed_alone_determines_a_fit(few_steps, monkeypatch):
    """Neither threads nor the global generators matter, and a fit does not change them."""

    def state():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), torch.backends.mkldnn.enabled  # noqa: NPY002

    torch.set_num_threads(1)
    torch.manual_seed(1)
    during, before = [], state()
    monkeypatch.setattr("builtins.print", lambda *_, **__: during.append(state()))
    model = AdaptiveMemoryClassifier(20, init="kmeans", random_state=0, verbose=True)
    with ThreadPoolExecutor(2) as threads:
        models = list(threads.map(lambda _: clone(model).fit(X, Y), range(2)))
    assert during == [before] * 10
    torch.manual_seed(2)
    alone = clone(model).fit(X, Y).predict_proba(X)
    assert all(np.array_equal(each.predict_proba(X), alone) for each in models)
    rows, target = make_friedman1(400, 5, random_state=0)
    models = [AdaptiveMemoryRegressor(20, init="kmeans", random_state=seed) for seed in (0, 1)]
    first, second = (each.fit(rows, target).predict(rows) for each in models)
    assert not np.array_equal(first, second)  # the similarity is learned on other rows


def test_nearest_cases_are_training_rows_with_the_largest_weights(fitted):
    count = len(fitted.cases_)
    cases, weights = fitted.nearest_cases(X[1::2], count)
    assert (np.diff(weights) <= 0).all()
    np.testing.assert_allclose(weights.sum(1), 1)
    assert np.array_equal(fitted.cases_, X[::2][fitted.case_indices_])
    assert np.array_equal(fitted.case_targets_, Y[::2][fitted.case_indices_])
    assert (fitted.case_targets_[cases[:, 0]] == Y[1::2]).mean() > 0.9
    assert (fitted.nearest_cases(fitted.cases_, 1)[0][:, 0] == np.arange(count)).all()  # a case is nearest to itself
    for wrong in (count + 1, 0, 1.5, "a", None, True):
        refuses(f"n_nearest must be an integer .* the {count} cases, got {wrong!r}", fitted.nearest_cases, X, wrong)


def test_few_and_kmeans_cases():
    for settings in ({"n_cases": np.int64(20), "init": "kmeans"}, {"linear": False}):
        model = AdaptiveMemoryClassifier(**settings, random_state=0).fit(X, Y)
        assert model.score(X, Y) > 0.9
        assert len(model.cases_) == settings.get("n_cases", 149)  # two of the 150 rows are equal
        assert bool((model.network_.linear != 0).any()) == settings.get("linear", True)
    with pytest.warns(UserWarning, match="n_cases=1000 exceeds the 149 rows to choose from") as warned:
        assert len(AdaptiveMemoryClassifier(n_cases=1000, random_state=0).fit(X, Y).cases_) == 149
    assert warned[0].filename == __file__


@pytest.mark.parametrize("rows", [np.ones((30, 2)), np.full((30, 1), np.nan)], ids=["constant", "missing"])
def test_features_without_information_predict_the_mean(rows, few_steps):
    model = AdaptiveMemoryRegressor(random_state=0).fit(rows, np.arange(30.0))
    np.testing.assert_allclose(model.predict(rows), 14.5, atol=0.5)
    np.testing.assert_array_equal(model.predict(rows + 5), model.predict(rows))


@pytest.mark.parametrize(("settings", "message"), [
    ({"n_cases": 0}, "n_cases must be an integer of at least 1, got 0"),
    ({"n_cases": True}, "n_cases must be an integer of at least 1, got True"),
    ({"init": "center"}, "init must be one of rows, kmeans, got 'center'"),
    ({"linear": "x"}, "linear must be True or False, got 'x'"),
    ({"verbose": None}, "verbose must be True or False, got None"),
    ({"damage": 1}, "damage must be a number of at least 0 and below 1, got 1"),
    ({"class_weight": "even"}, "class_weight must be one of balanced, got 'even'"),
    ({"class_weight": {0: -1}}, "class_weight must have no negative number"),
    ({"device": "nonsense"}, "device must be 'auto' or an available PyTorch device, got 'nonsense'"),
    ({"device": "meta"}, "device must be 'auto' or an available PyTorch device, got 'meta'"),
    ({"device": "cuda:99"}, "device must be 'auto' or an available PyTorch device, got 'cuda:99'"),
], ids=str)  # fmt: skip
def test_bad_parameters(settings, message):
    refuses(message, AdaptiveMemoryClassifier(**settings).fit, X, Y)


def test_bad_weights_and_infinity():
    with pytest.raises(ValueError, match="contains infinity"):
        AdaptiveMemoryClassifier().fit(np.where(X > 7, np.inf, X), Y)
    for weight in (np.zeros(150), -np.ones(150), np.ones((150, 2)), np.full(150, 1e308)):
        refuses("sample_weight must be one number per row", AdaptiveMemoryClassifier().fit, X, Y, sample_weight=weight)


@pytest.mark.parametrize("scale", [1e100, 1e-100])
def test_targets_of_any_scale(scale, few_steps):
    rows, target = ROWS[::4], TARGET[::4]
    plain, scaled = (AdaptiveMemoryRegressor(random_state=0).fit(rows, target * each) for each in (1.0, scale))
    np.testing.assert_allclose(scaled.predict(rows), scale * plain.predict(rows), rtol=1e-3)
    with pytest.raises(ah.AHopError, match="y must have a variance within the range of float64, got targets from"):
        AdaptiveMemoryRegressor().fit(rows, target * scale**3)


@pytest.mark.parametrize("value", [1e-310, 1e200])
def test_a_constant_target_is_predicted(value, few_steps):
    model = AdaptiveMemoryRegressor(random_state=0).fit(X, np.full(150, value))
    np.testing.assert_allclose(model.predict(X), value, atol=0.05)


def test_features_that_overflow_are_named_and_a_failed_fit_leaves_the_estimator(few_steps):
    model = AdaptiveMemoryClassifier(20, random_state=0).fit(X, Y)
    before, rows = vars(model).copy(), X.copy()
    rows[:, 2] = np.where(Y == 1, 1e200, -1e200)
    refuses("X must have a finite range and variance in float64, got feature 2", model.fit, rows, Y)
    assert vars(model) == before
    fresh = clone(model)
    with pytest.raises(ah.AHopError):
        fresh.fit(rows, Y)
    for method in (fresh.predict, fresh.nearest_cases):
        with pytest.raises(NotFittedError):
            method(X)


def test_verbose_prints_every_step(capsys):
    model = AdaptiveMemoryClassifier(verbose=True, random_state=0).fit(X[::3], Y[::3])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(model.history_) == 40
    assert lines[-1] == f"step 40/40: leave-one-out error {model.history_[-1]:.4f}"
