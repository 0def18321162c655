"""The nearest-neighbor estimators: scikit-learn's own checks, and properties beyond them."""

import json
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from unittest import SkipTest

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes, load_iris, load_wine
from sklearn.exceptions import NotFittedError
from sklearn.impute import SimpleImputer
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

import ahop_layers as ah
from ahop_layers.neighbors import AdaptiveNeighborsClassifier, AdaptiveNeighborsRegressor
from tests.samples import refuses

pytestmark = pytest.mark.slow

X, Y = load_iris(return_X_y=True)
NAMES = np.array(["setosa", "versicolor", "virginica"])
KINDS = (AdaptiveNeighborsClassifier, AdaptiveNeighborsRegressor)


@pytest.fixture(scope="module")
def fitted() -> AdaptiveNeighborsClassifier:
    return AdaptiveNeighborsClassifier(random_state=0).fit(X[::2], NAMES[Y[::2]])


@pytest.mark.recorded  # scikit-learn asks for accuracies on data of its own seeds
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_checks_of_scikit_learn_pass(kind, small_fit):
    checks = list(estimator_checks_generator(kind()))
    assert len(checks) > 50
    for estimator, check in checks[::9]:  # make test-all has every check
        with suppress(SkipTest):
            check(estimator)


@pytest.mark.full
@pytest.mark.recorded
@pytest.mark.parametrize("kind", KINDS)
def test_every_check_of_scikit_learn_passes(kind):
    code = f"""
import json, torch, warnings
from ahop_layers.neighbors import {kind.__name__}
from sklearn.utils.estimator_checks import check_estimator
torch.set_num_threads(1)
warnings.simplefilter("ignore")
checks = check_estimator({kind.__name__}(), on_fail=None, on_skip=None)
print(json.dumps([[check["check_name"], check["status"], str(check["exception"])] for check in checks]))
"""
    # SciPy reads SCIPY_ARRAY_API, without which one check is skipped, at import: in a process of its own.
    environment = {**os.environ, "SCIPY_ARRAY_API": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) > 50
    assert [result for result in results if result[1] != "passed" and "pandas is not installed" not in result[2]] == []


def damaged(rows: np.ndarray, kind: str, share: float, random: np.random.Generator) -> np.ndarray:
    """Replaces values by those of other rows, or by NaN."""
    others = np.stack([random.permutation(column) for column in rows.T], 1)
    return np.where(random.random(rows.shape) < share, others if kind == "replaced" else np.nan, rows)


@pytest.mark.parametrize(("data", "kind", "rival"), [
    (load_wine, AdaptiveNeighborsClassifier, KNeighborsClassifier),
    (load_diabetes, AdaptiveNeighborsRegressor, KNeighborsRegressor),
], ids=["classes", "numbers"])  # fmt: skip
def test_damaged_rows_are_predicted_at_least_as_well_as_by_the_manhattan_distance(data, kind, rival):
    rows, target = data(return_X_y=True)
    manhattan = make_pipeline(StandardScaler(), SimpleImputer(strategy="median"), rival(metric="manhattan"))
    models = [model.fit(rows[::2], target[::2]) for model in (kind(random_state=0), manhattan)]
    random, gains = np.random.default_rng(0), []
    for damage in ("replaced", "missing"):
        for share in (0.3, 0.5):
            queries = [damaged(rows[1::2], damage, share, random) for _ in range(5)]
            ours, other = (np.mean([model.score(each, target[1::2]) for each in queries]) for model in models)
            gains.append(ours - other)
    assert min(gains) > -0.01, gains
    assert np.mean(gains) > 0.03, gains


def test_probabilities_are_the_softmax_weights_of_a_class(fitted):
    distances, neighbors = fitted.kneighbors(X[1::2])
    assert distances.shape == (75, 30)
    weights = np.exp(-fitted.memory_.beta.item() * distances)
    weights /= weights.sum(1, keepdims=True)
    expected = np.stack([(weights * (Y[::2][neighbors] == label)).sum(1) for label in range(3)], 1)
    np.testing.assert_allclose(fitted.predict_proba(X[1::2]), expected, rtol=1e-8, atol=1e-12)
    assert (fitted.predict(X[1::2]) == fitted.classes_[expected.argmax(1)]).all()
    assert fitted.score(X[1::2], NAMES[Y[1::2]]) > 0.9


def test_neighbors_are_ordered_by_negative_scores(fitted):
    distances, indices = fitted.kneighbors(X[::2], n_neighbors=75)
    scores = fitted.memory_.scores(fitted.memory_.patterns.numpy())
    np.testing.assert_allclose(distances, -np.take_along_axis(scores, indices, 1), atol=1e-10)
    assert (np.diff(distances) >= 0).all()
    assert (distances[indices == np.arange(75)[:, None]] == 0).all()
    own = fitted.kneighbors(n_neighbors=np.int64(5), return_distance=False)
    for row in range(75):
        assert own[row].tolist() == indices[row][indices[row] != row][:5].tolist()
    assert fitted.kneighbors(n_neighbors=74)[1].shape == (75, 74)
    refuses("n_neighbors must be at most the number of other training rows, 74, got 75", fitted.kneighbors, None, 75)
    for count in (0, 1.5, True):
        refuses(f"n_neighbors must be an integer of at least 1, got {count!r}", fitted.kneighbors, X, count)
    # A row with many duplicates need not be among its own first neighbors, because ties are ordered by index.
    model = AdaptiveNeighborsClassifier(random_state=0)
    model.fit(np.repeat([[0.0, 1.0], [1.0, 0.0]], 6, axis=0), [0] * 6 + [1] * 6)
    assert model.kneighbors(None, 3, False)[[5, 1, 11]].tolist() == [[0, 1, 2], [0, 2, 3], [6, 7, 8]]


def test_units_of_columns_do_not_matter(fitted):
    factor, shift = np.array([1.0, 1e6, 1e-6, 1.0]), np.array([0.0, 1e3, 0.0, -7.0])
    scaled = AdaptiveNeighborsClassifier(random_state=0).fit(X[::2] * factor + shift, NAMES[Y[::2]])
    np.testing.assert_allclose(scaled.predict_proba(X * factor + shift), fitted.predict_proba(X), atol=1e-3)


@pytest.mark.filterwarnings("error")
def test_unknown_values_take_no_part(fitted, small_fit):
    random = np.random.default_rng(0)
    rows = np.where(random.random(X.shape) < 0.2, np.nan, X)
    rows[1] = np.nan  # answered by the rows around the mean
    model = AdaptiveNeighborsClassifier(random_state=0).fit(rows[::2], Y[::2])
    assert model.score(rows[1::2], Y[1::2]) > 0.85
    assert fitted.score(rows[1::2], NAMES[Y[1::2]]) > 0.85
    unknown = np.column_stack([X, np.full(len(X), np.nan)])
    regressor = AdaptiveNeighborsRegressor(random_state=0).fit(unknown[:, 1:], unknown[:, 0])
    unknown[:, 4] = random.normal(size=len(X))  # no training row knows this column
    assert regressor.score(unknown[:, 1:], unknown[:, 0]) > 0.7
    assert np.isfinite(regressor.predict([[np.nan, np.nan, np.nan, 3.0]])).all()
    with pytest.raises(ValueError, match="infinity"):
        model.predict(np.full((1, 4), np.inf))


@pytest.mark.parametrize("kind", KINDS)
def test_masked_values_are_unknown_and_columns_are_those_of_scikit_learn(kind, small_fit):
    masked = np.ma.masked_array(np.where(X > 3, -999, X), X > 3)
    unknown = masked.filled(np.nan)
    models = [kind(random_state=0).fit(rows, Y) for rows in (masked, unknown)]
    assert np.array_equal(models[0].kneighbors(masked)[0], models[1].kneighbors(unknown)[0])
    with pytest.raises(ValueError, match="NaN"):
        kind().fit(X, np.ma.masked_equal(Y, 1))
    frame = pytest.importorskip("pandas").DataFrame(X, columns=list("abcd"))
    model = kind(random_state=0).fit(frame, Y)
    assert model.feature_names_in_.tolist() == list("abcd")
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[list("badc")])


def test_numbers_are_the_weighted_mean_of_those_of_the_neighbors(small_fit):
    random = np.random.default_rng(0)
    places, stations = random.uniform(0, 20, (400, 2)), random.uniform(0, 20, (30, 2))
    signal = -30 - 4 * np.linalg.norm(places[:, None] - stations, axis=-1) + random.normal(0, 3, (400, 30))
    model = AdaptiveNeighborsRegressor(5, random_state=0).fit(signal[:300], places[:300])
    predicted = model.predict(damaged(signal[300:], "missing", 0.3, random))
    assert np.linalg.norm(predicted - places[300:], axis=-1).mean() < 2
    model.n_neighbors = 1
    nearest = model.kneighbors(signal[300:], return_distance=False)[:, 0]
    np.testing.assert_allclose(model.predict(signal[300:]), places[nearest])


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_depends_on_its_seed_alone_and_is_pickled(kind, small_fit):
    torch.manual_seed(7)
    similarity = ah.AdaptiveSimilarity(4, bases=("dis", "l1"), init="dis")
    settings = {"similarity": similarity, "damage": ah.variants.Replaced((0.0, 0.6))}
    models = [kind(**settings, random_state=seed).fit(X[::2], Y[::2]) for seed in (0, 0, 1)]
    assert not similarity.w[:, :-1].any()  # each fit learns a copy
    expected, same, other = (model.kneighbors(X)[0] for model in models)
    assert np.array_equal(expected, same)
    assert not np.array_equal(expected, other)
    assert np.array_equal(pickle.loads(pickle.dumps(models[0])).predict(X), models[0].predict(X))
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(7).get_state())


@pytest.mark.parametrize(("settings", "message"), [
    ({"n_neighbors": 0}, "n_neighbors must be an integer of at least 1, got 0"),
    ({"similarity": "L2"}, "similarity must be .* got 'L2'"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_bad_parameters(kind, settings, message):
    model = kind(**settings)
    refuses(message, model.fit, X, Y)
    for method in (model.predict, model.kneighbors):
        with pytest.raises(NotFittedError):
            method(X)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_is_on_the_device_that_is_given(kind):
    model = kind(random_state=0, device="cuda").fit(X[::2], Y[::2])
    assert model.memory_.patterns.is_cuda
    assert model.score(X[1::2], Y[1::2]) > 0.9
