"""Memories of small tables: the closed-form readout, categories, missing values, units, weights of classes."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris, make_friedman1
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import RidgeCV
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler

import ahop_layers as ah
from ahop_layers.tabular import AdaptiveMemoryClassifier, AdaptiveMemoryRegressor, base, projection
from ahop_layers.tabular.columns import Categories, RowEncoding
from ahop_layers.tabular.projection import Examples, ProjectionNetwork, fit_projection

X, Y = load_iris(return_X_y=True)
ROWS, TARGET = load_diabetes(return_X_y=True)


@pytest.fixture(scope="module")
def fitted() -> AdaptiveMemoryClassifier:
    return AdaptiveMemoryClassifier(random_state=0).fit(X[::2], Y[::2])


def words() -> tuple[np.ndarray, np.ndarray]:
    """Rows of a color, a size with missing values and a number, and labels that need color and size."""
    random = np.random.default_rng(0)
    color, size = random.choice(["red", "green", "blue"], 300), random.normal(size=300)
    labels = np.where((color == "green") & (size > -0.5), "yes", "no")
    size[random.random(300) < 0.1] = np.nan
    return np.column_stack([color.astype(object), size, random.normal(size=300)]), labels


def test_defaults_are_not_below_linear_models_and_forests():
    model = AdaptiveMemoryRegressor(random_state=0).fit(ROWS[::2], TARGET[::2])
    linear = RidgeCV(alphas=np.logspace(-3, 3, 7)).fit(StandardScaler().fit_transform(ROWS)[::2], TARGET[::2])
    other = linear.score(StandardScaler().fit_transform(ROWS)[1::2], TARGET[1::2])
    assert model.score(ROWS[1::2], TARGET[1::2]) > other - 0.03
    rows, labels = load_breast_cancer(return_X_y=True)
    areas = [
        roc_auc_score(labels[1::2], each.fit(rows[::2], labels[::2]).predict_proba(rows[1::2])[:, 1])
        for each in (AdaptiveMemoryClassifier(random_state=0), RandomForestClassifier(random_state=0))
    ]
    assert areas[0] > areas[1] - 0.02


def test_units_of_columns_and_targets_change_nothing():
    scale, shift = np.logspace(-6, 6, 10), np.linspace(-100, 100, 10)
    model = AdaptiveMemoryRegressor(random_state=0).fit(ROWS[::2], TARGET[::2])
    other = AdaptiveMemoryRegressor(random_state=0).fit(scale * (ROWS[::2] + shift), 1e4 * TARGET[::2] - 7)
    expected = model.predict(ROWS)
    np.testing.assert_allclose((other.predict(scale * (ROWS + shift)) + 7) / 1e4, expected, rtol=1e-5)


def test_the_projection_is_the_default():
    rows, target = make_friedman1(600, 20, random_state=0)
    model = AdaptiveMemoryRegressor(random_state=0).fit(rows[::2], target[::2])
    assert model.readout_ == "projection"
    assert model.score(rows[1::2], target[1::2]) > 0.85


def leave_one_out(damage: float) -> tuple[ProjectionNetwork, Examples, torch.Tensor]:
    """A fitted network and its leave-one-out outputs."""
    rows = torch.from_numpy(ROWS[:60])
    weight = torch.from_numpy(np.random.default_rng(0).uniform(0.5, 2, 60))
    weight /= weight.mean()
    encoding = RowEncoding(rows, weight, [])
    target = torch.from_numpy(TARGET[:60, None] - TARGET[:60].mean()) / 50
    network = ProjectionNetwork(encoding, encoding(rows), 10)
    examples = Examples(rows, target, weight, weight)
    _, judged, outputs = fit_projection(network, examples, damage, True, torch.Generator().manual_seed(0))
    return network, examples, outputs[judged.argsort()]


def test_leave_one_out_outputs_are_those_of_fits_without_the_row(monkeypatch):
    """The closed form equals a readout that is solved again for each row, with the same cases and regularization."""
    monkeypatch.setattr("ahop_layers.tabular.projection.REGULARIZATION", torch.ones(1).double())
    found: dict[str, torch.Tensor] = {}
    learn = fit_projection.__globals__["_learn"]

    def remember(*arguments):
        history, settings = learn(*arguments)
        found["regularization"], found["linear"] = settings.regularization.exp(), settings.linear.exp()
        return history, settings

    monkeypatch.setattr("ahop_layers.tabular.projection._learn", remember)
    network, examples, outputs = leave_one_out(0.0)
    kernel = network.scores(examples.rows).exp()
    kernel += found["linear"] / 10 * network.encoding(examples.rows) @ network.cases.T
    for row in range(0, 60, 7):
        weight = examples.weight.clone()
        weight[row] = 0
        matrix = kernel.T @ (weight[:, None] * kernel) + found["regularization"] * kernel
        readout = torch.linalg.solve(matrix, kernel.T @ (weight[:, None] * examples.target))
        torch.testing.assert_close(kernel[row] @ readout, outputs[row], rtol=1e-5, atol=1e-6)


def test_scores_are_those_of_the_adaptive_similarity():
    network, examples, _ = leave_one_out(0.3)
    scaled = network.encoding(examples.rows) * network.feature_weight
    distances = (scaled[:, None] - scaled).abs().sort(-1).values.cumsum(-1)
    torch.testing.assert_close(network.scores(examples.rows), -distances @ network.similarity.w[0])
    assert (network.similarity.w[0, :-1] != 0).all()  # rank weights are learned from damaged rows
    network, examples, _ = leave_one_out(0.0)
    assert (network.similarity.w[0, :-1] == 0).all()
    assert (network.feature_weight != 1).all()


def test_training_on_damage_helps_with_wrong_cells():
    rows, labels = load_breast_cancer(return_X_y=True)
    random = np.random.default_rng(0)
    tested, truth = rows[1::2], labels[1::2]
    queries = np.where(random.random(tested.shape) < 0.6, random.permuted(tested, axis=0), tested)
    areas = []
    for damage in (0.0, 0.5):
        model = AdaptiveMemoryClassifier(damage=damage, random_state=0).fit(rows[::2], labels[::2])
        areas.append(roc_auc_score(truth, model.predict_proba(queries)[:, 1]))
    assert areas[1] > areas[0]


def test_categories_and_missing_values():
    rows, labels = words()
    model = AdaptiveMemoryClassifier(random_state=0).fit(rows[::2], labels[::2])
    assert model.score(rows[1::2], labels[1::2]) > 0.85
    assert model.feature_weights_.shape == (3,)
    unknown = np.array([["purple", 0.3, 0.0], [None, 0.3, 0.0], ["green", np.nan, np.nan]], dtype=object)
    probabilities = model.predict_proba(unknown)
    assert np.isfinite(probabilities).all()
    np.testing.assert_allclose(probabilities[0], probabilities[1])  # no training row lacks a color
    copy = pickle.loads(pickle.dumps(model))
    assert np.array_equal(copy.predict_proba(rows), model.predict_proba(rows))
    mlp = AdaptiveMemoryClassifier(max_epochs=10, random_state=0).fit(rows[::2], labels[::2])
    assert mlp.readout_ == "mlp"
    assert mlp.score(rows[1::2], labels[1::2]) > 0.75
    assert np.isfinite(mlp.predict_proba(unknown)).all()


def test_data_frames_keep_the_order_of_columns_and_categories():
    pandas = pytest.importorskip("pandas")
    rows, labels = words()
    frame = pandas.DataFrame(rows, columns=["color", "size", "number"])
    frame["color"] = frame["color"].astype("category")
    frame[["size", "number"]] = frame[["size", "number"]].astype(float)
    model = AdaptiveMemoryClassifier(random_state=0).fit(frame, labels)
    expected = AdaptiveMemoryClassifier(random_state=0).fit(rows, labels).predict_proba(rows)
    assert np.array_equal(model.predict_proba(frame), expected)
    assert np.array_equal(model.predict_proba(frame.astype({"color": object})), expected)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["size", "color", "number"]])


def test_a_numeric_feature_stays_numeric():
    model = AdaptiveMemoryClassifier(random_state=0).fit(X, Y)
    with pytest.raises(ValueError, match="feature 1 was numeric in fit, got 'a'"):
        model.predict(np.array([[1.0, "a", 2.0, 3.0]], dtype=object))
    with pytest.raises(TypeError, match="argument must be a string or a number"):
        model.predict(np.array([[1.0, {}, 2.0, 3.0]], dtype=object))
    assert Categories().fit(X).codes == {}


def test_a_weight_is_a_repetition_and_order_does_not_matter():
    weight = np.random.default_rng(0).integers(0, 4, len(X))
    order = np.random.default_rng(1).permutation(len(X))
    weighted = AdaptiveMemoryClassifier(random_state=0).fit(X[order], Y[order], sample_weight=weight[order])
    repeated = AdaptiveMemoryClassifier(random_state=0).fit(X.repeat(weight, axis=0), Y.repeat(weight))
    assert np.array_equal(weighted.predict_proba(X), repeated.predict_proba(X))
    rows = np.where(X > 6.5, np.nan, X)  # missing values are equal
    weighted = AdaptiveMemoryClassifier(random_state=0).fit(rows, Y, sample_weight=weight)
    repeated = AdaptiveMemoryClassifier(random_state=0).fit(rows.repeat(weight, axis=0), Y.repeat(weight))
    assert np.array_equal(weighted.predict_proba(rows), repeated.predict_proba(rows))


def test_weights_of_classes():
    labels = (Y == 2).astype(int)
    rows = X[:, :1]
    plain, balanced, same = (
        AdaptiveMemoryClassifier(class_weight=weight, random_state=0).fit(rows, labels)
        for weight in (None, "balanced", {0: 0.5, 1: 1.0})
    )
    assert balanced.predict_proba(rows)[:, 1].mean() > plain.predict_proba(rows)[:, 1].mean() + 0.02
    np.testing.assert_allclose(balanced.predict_proba(rows), same.predict_proba(rows), rtol=1e-6)
    with pytest.raises(ah.AHopError, match="class_weight must be one of balanced, got 'even'"):
        AdaptiveMemoryClassifier(class_weight="even").fit(X, Y)
    with pytest.raises(ah.AHopError, match="class_weight must have no negative number"):
        AdaptiveMemoryClassifier(class_weight={0: -1}).fit(X, Y)


def test_probabilities_are_calibrated(fitted):
    """The mean log loss of unseen rows is smaller than that of twice as sure and of half as sure predictions."""
    rows, labels = load_breast_cancer(return_X_y=True)
    model = AdaptiveMemoryClassifier(random_state=0).fit(rows[::2], labels[::2])
    odds = model.decision_function(rows[1::2])
    losses = [np.logaddexp(0, -factor * odds * (2 * labels[1::2] - 1)).mean() for factor in (0.5, 1, 2)]
    assert losses[1] < min(losses[0], losses[2])
    np.testing.assert_allclose(fitted.predict_proba(X).sum(1), 1)


def test_seeds_and_clones(fitted):
    again = clone(fitted).fit(X[::2], Y[::2])
    assert np.array_equal(again.predict_proba(X), fitted.predict_proba(X))
    rows, target = make_friedman1(400, 5, random_state=0)
    first, second = (AdaptiveMemoryRegressor(random_state=seed).fit(rows, target).predict(rows) for seed in (0, 1))
    assert not np.array_equal(first, second)  # the similarity is learned on other rows


def test_nearest_cases_are_rows_with_the_largest_weights(fitted):
    cases, weights = fitted.nearest_cases(X[1::2], 3)
    assert (np.diff(weights) <= 0).all()
    assert np.array_equal(fitted.cases_, X[::2][fitted.case_indices_])
    assert (fitted.case_targets_[cases[:, 0]] == Y[1::2]).mean() > 0.9


def test_few_and_kmeans_cases():
    for settings in ({"n_cases": 20}, {"n_cases": 20, "init": "kmeans"}, {"linear": False}):
        model = AdaptiveMemoryClassifier(**settings, random_state=0).fit(X, Y)
        assert model.score(X, Y) > 0.9
        assert len(model.cases_) == settings.get("n_cases", 149)  # two of the 150 rows are equal
        assert bool((model.network_.linear != 0).any()) == settings.get("linear", True)


def test_more_cases_than_rows_warn():
    with pytest.warns(UserWarning, match="n_cases=1000 exceeds the 149 rows to choose from"):
        model = AdaptiveMemoryClassifier(n_cases=1000, random_state=0).fit(X, Y)
    assert len(model.cases_) == 149


def test_settings_of_the_mlp_select_it():
    assert AdaptiveMemoryClassifier(knots=None, max_epochs=1).fit(X, Y).readout_ == "mlp"
    assert AdaptiveMemoryClassifier(readout="mlp", max_epochs=1).fit(X, Y).readout_ == "mlp"
    with pytest.raises(ah.AHopError, match=r"readout='projection' has no setting hidden, got \(8,\)"):
        AdaptiveMemoryClassifier(readout="projection", hidden=(8,)).fit(X, Y)
    with pytest.raises(ah.AHopError, match="damage needs readout='projection', got damage"):
        AdaptiveMemoryClassifier(hidden=(8,), damage=0.5).fit(X, Y)
    with pytest.raises(ah.AHopError, match="readout must be one of auto, projection, mlp, got 'ridge'"):
        AdaptiveMemoryClassifier(readout="ridge").fit(X, Y)
    with pytest.raises(ah.AHopError, match="damage must be a number of at least 0 and below 1, got 1"):
        AdaptiveMemoryClassifier(damage=1).fit(X, Y)


@pytest.mark.parametrize("rows", [np.ones((30, 2)), np.full((30, 1), np.nan)], ids=["constant", "missing"])
def test_features_without_information_predict_the_mean(rows):
    target = np.arange(30.0)
    np.testing.assert_allclose(AdaptiveMemoryRegressor(random_state=0).fit(rows, target).predict(rows), 14.5, atol=0.5)


def test_wide_tables_learn_on_fewer_rows():
    rows = np.random.default_rng(0).normal(size=(200, 3000))
    sizes = []
    inverse = torch.linalg.inv

    def record(matrix):
        sizes.append(len(matrix))
        return inverse(matrix)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.linalg, "inv", record)
        model = AdaptiveMemoryRegressor(random_state=0).fit(rows, rows[:, 0])
    assert set(sizes) == {74}  # 74 * 74 * 3000 distances
    assert np.isfinite(model.predict(rows)).all()


def skewed(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a skewed number with missing values, a color and noise, and labels that depend on the first two."""
    random = np.random.default_rng(0)
    color, noise = random.choice(["red", "green", "blue"], count), random.normal(size=count)
    size = np.exp(6 * random.normal(size=count))
    labels = ((np.log(size) > 0) & (np.log(size) < 6)) ^ (color == "green")
    size[random.random(count) < 0.05] = np.nan
    return np.column_stack([color.astype(object), size, noise]), labels


def test_ramps_add_up_to_an_increasing_function():
    random = np.random.default_rng(0)
    rows = torch.from_numpy(np.exp(2 * random.normal(size=(300, 3))))
    rows[:, 1] = rows[:, 1].round().clamp(max=4)  # few values
    rows[:, 2] = 1.0
    weight = torch.from_numpy(random.uniform(0.5, 2, 300))
    encoding = RowEncoding(rows, weight, [], knots=12)
    columns = encoding(rows)
    assert columns.shape == (300, 3 * 11)
    sums = encoding.add_ramps(columns)
    assert (sums[rows[:, 0].argsort(), 0].diff() > 0).all()
    torch.testing.assert_close(weight @ sums, torch.zeros(3).double(), atol=1e-9, rtol=0)
    deviations = (weight @ sums.square() / weight.sum()).sqrt()
    torch.testing.assert_close(deviations, torch.tensor([1.0, 1.0, 0.0]).double())
    assert not encoding(torch.full((1, 3), torch.nan).double()).any()
    outside = encoding(torch.tensor([[-1e9, -1e9, 0.0], [1e9, 1e9, 9.0]]).double())
    torch.testing.assert_close(outside, torch.stack([columns.min(0).values, columns.max(0).values]))


@pytest.mark.parametrize("init", ["rows", "kmeans"])
@pytest.mark.parametrize("knots", [0, 8])
def test_equal_rank_weights_need_no_sorting(init, knots):
    """The matrix product for indicators and the sums of ramps equal the adaptive similarity."""
    rows, _ = skewed(80)
    categories = Categories().fit(rows)
    matrix = torch.from_numpy(categories.encode(rows))
    encoding = RowEncoding(matrix, torch.ones(80).double(), [0], knots)
    columns = encoding(matrix)
    cases = columns[:20] if init == "rows" else columns.unflatten(0, (20, 4)).mean(1)
    network = ProjectionNetwork(encoding, cases, 3)
    column_weight = torch.rand(columns.shape[1], generator=torch.Generator().manual_seed(0)).double() + 0.5
    rank_weight = torch.tensor([[0.0, 0.0, 0.7]]).double()
    plain, ranked = (network.compare(columns, cases, column_weight, rank_weight, each) for each in (False, True))
    torch.testing.assert_close(plain, ranked)


def test_shapes_keep_the_spread_of_a_feature():
    blocks, spread = torch.tensor([0, 0, 1]), torch.tensor([1.0, 3.0, 2.0])
    settings = projection.Settings(torch.tensor([0.5, -1.0]), torch.tensor([0.3, -0.7, 2.0]), *[torch.zeros(())] * 4)
    weights = settings.column_weight(blocks, spread)
    torch.testing.assert_close((weights * spread)[:2].sum(), torch.tensor(0.5).exp() * 4)
    torch.testing.assert_close(weights[2], torch.tensor(-1.0).exp())
    torch.testing.assert_close(weights[0] / weights[1], torch.tensor(1.0).exp())


@pytest.fixture
def large(monkeypatch):
    """Makes a table of more than 400 rows a large one."""
    monkeypatch.setattr(base, "SMALL_ROWS", 400)
    monkeypatch.setattr(base, "LARGE_CASES", 300)
    monkeypatch.setattr(projection, "JUDGED_ROWS", 300)
    monkeypatch.setattr(projection, "LARGE", projection.LARGE._replace(steps=40, rows=256))


def test_large_tables_learn_increasing_functions_of_features(large, monkeypatch):
    rows, labels = skewed(1600)
    model = AdaptiveMemoryClassifier(random_state=0).fit(rows[::2], labels[::2])
    network = model.network_
    assert (len(model.cases_), len(model.history_), network.encoding.ramps) == (300, 40, 31)
    assert model.feature_weights_[0] > 2 * model.feature_weights_[2]
    assert network.column_weight[network.blocks == 1].std() > 0.1
    monkeypatch.setattr(base, "SMALL_ROWS", 5000)
    small = AdaptiveMemoryClassifier(n_cases=300, random_state=0).fit(rows[::2], labels[::2])
    assert small.network_.encoding.ramps == 0
    scores = [each.score(rows[1::2], labels[1::2]) for each in (model, small)]
    assert scores[0] > max(0.93, scores[1] + 0.01)


def test_large_tables_are_fitted_reproducibly_in_any_units(large):
    rows, target = make_friedman1(600, 6, random_state=0)
    scale = np.logspace(-6, 6, 6)
    models = [AdaptiveMemoryRegressor(random_state=0).fit(part, target) for part in (rows, rows, scale * rows - 3)]
    first, again, other = (
        each.predict(part) for each, part in zip(models, (rows, rows, scale * rows - 3), strict=True)
    )
    assert np.array_equal(first, again)
    np.testing.assert_allclose(first, other, rtol=1e-3)
    assert np.corrcoef(first, target)[0, 1] > 0.97


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("damage", [0.0, 0.3])
def test_fits_on_the_gpu_are_reproducible_and_those_of_the_cpu(large, damage):
    rows, labels = skewed(800)
    devices = ("cuda", "cuda", "cpu")
    models = [AdaptiveMemoryClassifier(damage=damage, random_state=0, device=device) for device in devices]
    first, again, other = (model.fit(rows[::2], labels[::2]).predict_proba(rows) for model in models)
    assert np.array_equal(first, again)
    assert np.abs(first - other).max() < 0.05


def test_damage_needs_no_ramps(large):
    rows, labels = skewed(600)
    model = AdaptiveMemoryClassifier(damage=0.3, random_state=0).fit(rows, labels)
    assert model.network_.encoding.ramps == 0
    assert model.network_.similarity.w[0, :-1].all()


def test_tables_with_many_rows_have_an_mlp(monkeypatch):
    monkeypatch.setattr(base, "PROJECTION_ROWS", 100)
    assert AdaptiveMemoryClassifier(random_state=0).fit(X, Y).readout_ == "mlp"
    assert AdaptiveMemoryClassifier(readout="projection", random_state=0).fit(X, Y).readout_ == "projection"


def test_verbose_prints_every_step(capsys):
    model = AdaptiveMemoryClassifier(verbose=True, random_state=0).fit(X[::3], Y[::3])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(model.history_) == 40
    assert lines[-1] == f"step 40/40: leave-one-out error {model.history_[-1]:.4f}"
