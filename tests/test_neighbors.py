"""The nearest-neighbor estimators. tests/test_tabular.py runs the checks of scikit-learn on them."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris
from sklearn.exceptions import NotFittedError
from sklearn.neighbors import KNeighborsRegressor

import ahop_layers as ah
from ahop_layers.tabular import AdaptiveNeighborsClassifier, AdaptiveNeighborsRegressor, distances
from tests.samples import refuses

pytestmark = pytest.mark.slow

X, Y = load_iris(return_X_y=True)
NAMES = np.array(["setosa", "versicolor", "virginica"])
FAST = {"epochs": 12, "batch_size": 256, "random_state": 0, "device": "cpu"}


@pytest.fixture(scope="module")
def fitted() -> AdaptiveNeighborsClassifier:
    return AdaptiveNeighborsClassifier(**FAST).fit(X[::2], NAMES[Y[::2]])


def standardized(rows: np.ndarray, stored: np.ndarray) -> np.ndarray:
    return (rows - stored.mean(0)) / stored.std(0)


def scores_by_hand(model: AdaptiveNeighborsClassifier, rows: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Scores ``(n, N)`` of an l1 similarity, from the definition."""
    similarity = model.memory_.similarity
    footprints = np.sort(-np.abs(rows[:, None] - stored), -1)[..., ::-1].cumsum(-1)
    return footprints @ (similarity.beta * similarity.w[0]).detach().numpy()


def test_probabilities_are_the_softmax_weights_of_a_class(fitted):
    stored, rows = standardized(X[::2], X[::2]), standardized(X[1::2], X[::2])
    weights = np.exp(fitted.memory_.beta.item() * scores_by_hand(fitted, rows, stored))
    weights /= weights.sum(1, keepdims=True)
    expected = np.stack([weights[:, Y[::2] == label].sum(1) for label in range(3)], 1)
    probabilities = fitted.predict_proba(X[1::2])
    np.testing.assert_allclose(probabilities, expected, rtol=1e-8)
    assert fitted.classes_.tolist() == NAMES.tolist()
    assert (fitted.predict(X[1::2]) == NAMES[expected.argmax(1)]).all()
    assert fitted.score(X[1::2], NAMES[Y[1::2]]) > 0.9


def test_neighbors_are_ordered_by_negative_scores(fitted):
    distances, indices = fitted.kneighbors(X[1::2], n_neighbors=75)
    scores = scores_by_hand(fitted, standardized(X[1::2], X[::2]), standardized(X[::2], X[::2]))
    np.testing.assert_allclose(distances, -np.take_along_axis(scores, indices, 1), atol=1e-10)
    assert (np.diff(distances) >= 0).all()
    assert (np.sort(indices) == np.arange(75)).all()
    few = fitted.kneighbors(X[1::2], return_distance=False)
    assert few.dtype == np.int64
    assert np.array_equal(few, indices[:, :5])


@pytest.mark.parametrize("bases", ["l1", ("dis",)])  # one name, or a tuple of names
def test_a_stored_row_has_distance_zero_to_itself(bases):
    rows = np.random.default_rng(0).normal(1e6, 1.0, (40, 3))  # rounding to float32 would move them
    model = AdaptiveNeighborsClassifier(**FAST, bases=bases).fit(rows, rows[:, 0] > 1e6)
    distances, indices = model.kneighbors(rows, 40)
    own = indices == np.arange(40)[:, None]
    assert (distances[own] == 0).all()


def test_neighbors_of_the_stored_rows_exclude_themselves(fitted):
    all_distances, all_indices = fitted.kneighbors(X[::2], n_neighbors=75)
    distances, indices = fitted.kneighbors()
    assert indices.shape == (75, 5)
    for row in range(75):
        others = all_indices[row] != row
        assert indices[row].tolist() == all_indices[row][others][:5].tolist()
        np.testing.assert_array_equal(distances[row], all_distances[row][others][:5])
    assert np.array_equal(fitted.kneighbors(None, 5, return_distance=False), indices)
    assert fitted.kneighbors(n_neighbors=74)[1].shape == (75, 74)
    refuses("between 1 and the 74 other stored rows, got 75", fitted.kneighbors, n_neighbors=75)
    for count in (0, 76, 1.5, True):
        refuses(f"n_neighbors must be an integer .* 75 stored rows, got {count!r}", fitted.kneighbors, X, count)
    # A row with many duplicates need not be among its own first neighbors, because ties are ordered by index.
    model = AdaptiveNeighborsClassifier(**FAST).fit(np.repeat([[0.0, 1.0], [1.0, 0.0]], 6, axis=0), [0] * 6 + [1] * 6)
    indices = model.kneighbors(n_neighbors=np.int64(3), return_distance=False)
    assert indices[[5, 1, 11]].tolist() == [[0, 1, 2], [0, 2, 3], [6, 7, 8]]


def test_training_leaves_a_row_out_of_its_own_memory():
    """Labels without structure: with a row in its own memory, the loss would fall to zero by a sharp similarity."""
    random = np.random.default_rng(0)
    rows, labels = random.normal(size=(60, 4)), random.permutation(np.arange(60) % 2)
    model = AdaptiveNeighborsClassifier(**{**FAST, "epochs": 60}).fit(rows, labels)
    assert np.mean(model.history_[-10:]) > 0.5


@pytest.mark.filterwarnings("ignore:fit did not improve")  # whether few steps help depends on the seed
@pytest.mark.parametrize(("bases", "scale"), [(("l1",), 1e-3), (("dis", "l1"), 1e3)], ids=str)
def test_unit_of_all_features_does_not_matter(bases, scale):
    """The inverse temperature follows the scale: weights are neither too uniform nor too sharp."""
    model = AdaptiveNeighborsClassifier(**FAST, standardize=False, bases=bases)
    expected, scaled = (clone(model).fit(each * X[::2], Y[::2]) for each in (1.0, scale))
    np.testing.assert_allclose(scaled.predict_proba(scale * X), expected.predict_proba(X), atol=0.01)
    np.testing.assert_allclose(scaled.history_, expected.history_, rtol=1e-2)
    assert np.mean(scaled.history_) < np.log(3)  # the loss of uniform weights


def test_training_on_a_variant_helps_with_its_damage():
    random = np.random.default_rng(0)
    centers = random.normal(size=(20, 16))
    labels = np.repeat(np.arange(20), 6)
    stored = centers[labels] + 0.3 * random.normal(size=(120, 16))
    target = random.integers(20, size=400)
    clean = centers[target] + 0.3 * random.normal(size=(400, 16))
    queries = np.where(random.random(clean.shape) < 0.4, random.uniform(-6, 6, clean.shape), clean)
    variant = ah.variants.Replaced(0.4, low=-4.0, high=4.0)
    settings = {**FAST, "epochs": 20, "bases": ("dis",)}
    plain, robust = (
        AdaptiveNeighborsClassifier(**settings, variant=each).fit(stored, labels) for each in (None, variant)
    )
    assert robust.score(queries, target) > plain.score(queries, target) + 0.1


@pytest.mark.parametrize("standardize", [True, False])
def test_a_variant_receives_standardized_rows(standardize):
    seen = []

    def record(origin, generator):
        seen.append(origin)
        return origin

    settings = {**FAST, "batch_size": 2000, "epochs": 3, "standardize": standardize}
    model = AdaptiveNeighborsClassifier(**settings, variant=ah.variants.Custom(record)).fit(X, Y)
    rows = torch.cat(seen).double()
    mean, std = (torch.zeros(4), torch.ones(4)) if standardize else (torch.tensor(X.mean(0)), torch.tensor(X.std(0)))
    torch.testing.assert_close(rows.mean(0), mean.double(), atol=0.1, rtol=0)
    torch.testing.assert_close(rows.std(0), std.double(), atol=0.1, rtol=0)
    plain = AdaptiveNeighborsClassifier(**settings).fit(X, Y)
    np.testing.assert_allclose(model.history_, plain.history_, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:fit did not improve")  # two normalized features of a block have only a sign
@pytest.mark.parametrize("blocks", [np.array([0, 1, 1, 0]), ah.Blocks(2, normalize=True)], ids=str)
def test_blocks_and_copies(blocks):
    model = AdaptiveNeighborsClassifier(**FAST, bases=("dis", "dot"), blocks=blocks).fit(X, Y)
    expected = model.predict_proba(X)
    assert model.score(X, Y) > 0.7
    for copy in (pickle.loads(pickle.dumps(model)), clone(model).fit(X, Y)):
        assert np.array_equal(copy.predict_proba(X), expected)
    assert not hasattr(clone(model), "classes_")


def test_scale_of_a_feature_matters_only_without_standardization(fitted):
    factor = np.array([1.0, 8.0, 0.25, 1.0])
    scaled = AdaptiveNeighborsClassifier(**FAST).fit(X[::2] * factor, NAMES[Y[::2]])
    np.testing.assert_allclose(scaled.predict_proba(X * factor), fitted.predict_proba(X), rtol=1e-4)
    raw = AdaptiveNeighborsClassifier(**FAST, standardize=False).fit(X, Y)
    torch.testing.assert_close(raw.memory_.patterns, torch.from_numpy(X), rtol=0, atol=0)
    assert raw.score(X, Y) > 0.9


def test_the_seed_alone_determines_a_fit(fitted):
    torch.manual_seed(7)
    numbers = {"epochs": np.int64(12), "batch_size": np.int32(256), "learning_rate": np.float64(0.05)}
    models = [AdaptiveNeighborsClassifier(**{**FAST, **numbers, "random_state": seed}) for seed in (0, 1)]
    same, other = (model.fit(X[::2], NAMES[Y[::2]]).history_ for model in models)
    assert same == fitted.history_ != other
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(7).get_state())


@pytest.mark.parametrize(("settings", "message"), [
    ({"bases": ("cosine",)}, r"bases must be .*, got \('cosine',\)"),
    ({"blocks": 3}, "blocks must divide d = 4: expected one of 1, 2, 4, got 3"),
    ({"blocks": "feature"}, "blocks must be None, an integer, .* got 'feature'"),
    ({"variant": 0.5}, "variant must be a variant or None, got 0.5"),
    ({"epochs": True}, "epochs must be an integer of at least 1, got True"),
    ({"batch_size": None}, "batch_size must be an integer of at least 1, got None"),
    ({"standardize": "x"}, "standardize must be True or False, got 'x'"),
    ({"learning_rate": "a"}, "learning_rate must be a positive number, got 'a'"),
    ({"device": "nonsense"}, "device must be 'auto' or an available PyTorch device, got 'nonsense'"),
], ids=str)  # fmt: skip
def test_bad_parameters(settings, message):
    model = AdaptiveNeighborsClassifier(**{**FAST, **settings})
    refuses(message, model.fit, X, Y)
    for method in (model.predict, model.kneighbors):
        with pytest.raises(NotFittedError):
            method(None if method == model.kneighbors else X)


def test_classifiers_take_missing_values():
    random = np.random.default_rng(0)
    rows = np.where(random.random(X.shape) < 0.2, np.nan, X)
    model = AdaptiveNeighborsClassifier(**FAST).fit(rows[::2], Y[::2])
    assert model.score(rows[1::2], Y[1::2]) > 0.85
    complete = AdaptiveNeighborsClassifier(**FAST, standardize=False).fit(X[::2], Y[::2])
    assert complete.score(rows[1::2], Y[1::2]) > 0.85
    with pytest.raises(ValueError, match="infinity"):
        model.predict(np.full((1, 4), np.inf))


@pytest.fixture(scope="module")
def fingerprints():
    """Signals of stations at places in a hall, NaN if not heard: two fingerprints at each place."""
    random = np.random.default_rng(0)
    place = np.repeat(random.uniform(0, 20, (200, 2)), 2, axis=0)
    stations = random.uniform(0, 20, (30, 2))
    distance = np.linalg.norm(place[:, None] - stations, axis=-1)
    signal = -30 - 4 * distance + random.normal(0, 3, distance.shape)
    signal[(signal < -75) | (random.random(signal.shape) < 0.2)] = np.nan
    return signal, place


def mean_error(model, rows, places) -> float:
    return np.linalg.norm(model.predict(rows) - places, axis=-1).mean()


@pytest.fixture(scope="module")
def positioned(fingerprints):
    signal, place = fingerprints
    return AdaptiveNeighborsRegressor(5, random_state=0).fit(signal[:300], place[:300])


def test_positions_are_the_mean_of_those_of_the_neighbors(positioned, fingerprints):
    signal, place = fingerprints
    distances, indices = positioned.kneighbors(signal[300:])
    assert indices.shape == (100, 5)
    assert (np.diff(distances) >= 0).all()
    np.testing.assert_allclose(positioned.predict(signal[300:]), place[indices].mean(1))
    own = positioned.kneighbors(return_distance=False)
    assert (own != np.arange(300)[:, None]).all()


def test_the_chosen_distance_is_about_the_best(positioned, fingerprints):
    signal, place = fingerprints
    assert positioned.similarity_ in positioned.errors_
    assert positioned.errors_[positioned.similarity_] < 1.05 * min(positioned.errors_.values())
    errors = {
        name: mean_error(clone(positioned).set_params(similarity=name).fit(signal[:300], place[:300]), signal[300:],
                         place[300:])
        for name in distances.PLAIN
    }  # fmt: skip
    assert mean_error(positioned, signal[300:], place[300:]) < 1.05 * min(errors.values())
    assert max(errors.values()) > 1.2 * min(errors.values())  # the choice matters


@pytest.mark.parametrize("name", ["L1", "Euclid", "cosine", "Sorensen"])
def test_plain_distances_are_those_of_scikit_learn(name, fingerprints):
    signal, place = fingerprints
    low, high = np.nanmin(signal[:300]), np.nanmax(signal[:300])
    step = (high - low) / 64
    scaled = np.nan_to_num((signal - low + step) / (high - low + step)).clip(0)
    metric = {"L1": "manhattan", "Euclid": "euclidean", "cosine": "cosine", "Sorensen": "braycurtis"}[name]
    for power, prefix in ((1, ""), (np.e, "powed ")):
        rival = KNeighborsRegressor(5, metric=metric, algorithm="brute").fit(scaled[:300] ** power, place[:300])
        model = AdaptiveNeighborsRegressor(5, similarity=prefix + name).fit(signal[:300], place[:300])
        np.testing.assert_allclose(model.predict(signal[300:]), rival.predict(scaled[300:] ** power))
        assert model.errors_ == {}


def test_weights_of_ranks_are_applied_to_a_shortlist(fingerprints, monkeypatch):
    signal, place = fingerprints
    model = AdaptiveNeighborsRegressor(3, similarity="learned", random_state=0).fit(signal[:300], place[:300])
    assert any(term.ranked for term in model.memory_.similarity.terms)
    expected = model.kneighbors(signal[300:])
    monkeypatch.setattr("ahop_layers.tabular.neighbors.SHORTLIST", 150)
    for found, complete in zip(model.kneighbors(signal[300:]), expected, strict=True):
        np.testing.assert_allclose(found, complete, rtol=1e-9)


def test_tables_with_features_in_other_units_are_standardized():
    rows, target = load_diabetes(return_X_y=True)
    rows = rows * np.logspace(-3, 3, 10)
    model = AdaptiveNeighborsRegressor(15, random_state=0).fit(rows[::2], target[::2])
    assert set(model.errors_) == {"standardized L1", "standardized Euclid", *distances.LEARNED}
    assert model.score(rows[1::2], target[1::2]) > 0.35
    rows[np.random.default_rng(0).random(rows.shape) < 0.2] = np.nan
    model = AdaptiveNeighborsRegressor(15, random_state=0).fit(rows[::2], target[::2])
    assert model.score(rows[1::2], target[1::2]) > 0.25


def test_equal_places_do_not_answer_each_other():
    rows, places = torch.rand(40, 3), torch.arange(20.0).repeat_interleave(2)[:, None].expand(-1, 2)
    asked = distances.ask(rows, places, 2, 40, 40)
    assert asked.blocked.sum(1).tolist() == [2] * 40
    assert distances.ask(rows, places[:, :1], 2, 40, 40).blocked.sum(1).tolist() == [1] * 40
    assert len(distances.ask(rows, torch.zeros(40, 2), 1, 40, 40).query) == 0


def test_a_regressor_of_few_rows_takes_a_plain_distance(fingerprints):
    signal, place = fingerprints
    model = AdaptiveNeighborsRegressor(1).fit(signal[:2], place[:2])
    assert (model.similarity_, model.errors_) == ("standardized L1", {})
    np.testing.assert_allclose(model.predict(signal[:2]), place[:2])
    with pytest.raises(ah.AHopError, match="n_neighbors must be an integer between 1 and the 2 stored rows, got 5"):
        AdaptiveNeighborsRegressor().fit(signal[:2], place[:2]).predict(signal)


@pytest.mark.parametrize(("settings", "message"), [
    ({"n_neighbors": 0}, "n_neighbors must be an integer of at least 1, got 0"),
    ({"similarity": "L2"}, "similarity must be .* got 'L2'"),
], ids=str)  # fmt: skip
def test_bad_parameters_of_a_regressor(settings, message, fingerprints):
    refuses(message, AdaptiveNeighborsRegressor(**settings).fit, *fingerprints)


def test_a_regressor_is_pickled_and_depends_on_its_seed_alone(positioned, fingerprints):
    signal, place = fingerprints
    same = AdaptiveNeighborsRegressor(5, random_state=0).fit(signal[:300], place[:300])
    for model in (same, pickle.loads(pickle.dumps(positioned))):
        assert np.array_equal(model.predict(signal), positioned.predict(signal))
    assert same.errors_ == positioned.errors_
