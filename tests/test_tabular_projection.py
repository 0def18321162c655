"""The memory with a closed-form readout: leave-one-out errors, scores, encodings, large tables."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes, make_friedman1

from ahop_layers.tabular import AdaptiveMemoryClassifier, AdaptiveMemoryRegressor, memory, projection
from ahop_layers.tabular.columns import Categories, RowEncoding
from ahop_layers.tabular.projection import ProjectionNetwork
from ahop_layers.tabular.rows import Examples

pytestmark = pytest.mark.slow

ROWS, TARGET = load_diabetes(return_X_y=True)


def fit(damage: float) -> tuple[ProjectionNetwork, Examples]:
    """A network that is fitted to weighted rows."""
    rows = torch.from_numpy(ROWS[:60])
    weight = torch.from_numpy(np.random.default_rng(0).uniform(0.5, 2, 60))
    weight /= weight.mean()
    encoding = RowEncoding(rows, weight, [])
    examples = Examples(rows, torch.from_numpy(TARGET[:60, None]) / 50, weight, weight, torch.arange(60))
    network = ProjectionNetwork(encoding, encoding(rows), ranked=damage > 0)
    options = projection.SMALL._replace(damage=damage)
    projection.fit_projection(network, examples, options, torch.Generator().manual_seed(0))
    return network, examples


def test_leave_one_out_outputs_are_those_of_fits_without_the_row(monkeypatch):
    """The closed form equals a readout that is solved again for each row, with the same cases and regularization."""
    monkeypatch.setattr(projection, "REGULARIZATION", torch.ones(1).double())
    found = {}
    solve = projection._solve

    def remember(network, examples, settings, *rest):
        judged, outputs = solve(network, examples, settings, *rest)
        found.update(examples=examples, settings=settings, outputs=outputs[judged.argsort()])
        return judged, outputs

    monkeypatch.setattr(projection, "_solve", remember)
    network, _ = fit(0.0)
    examples, settings = found["examples"], found["settings"]
    columns = network.encoding(examples.rows)
    kernel = network.scores(columns).exp() + settings.linear.exp() / 10 * columns @ network.cases.T
    assert (examples.unit < examples.weight).any()  # a part of a large weight is left out
    for row in range(0, 60, 7):
        weight = examples.weight.clone()
        weight[row] -= examples.unit[row]
        matrix = kernel.T @ (weight[:, None] * kernel) + settings.regularization.exp() * kernel
        readout = torch.linalg.solve(matrix, kernel.T @ (weight[:, None] * examples.target))
        torch.testing.assert_close(kernel[row] @ readout, found["outputs"][row], rtol=1e-5, atol=1e-6)


def test_scores_are_those_of_the_adaptive_similarity():
    network, examples = fit(0.3)
    columns = network.encoding(examples.rows)
    scaled = columns * network.feature_weight
    distances = (scaled[:, None] - scaled).abs().sort(-1).values.cumsum(-1)
    torch.testing.assert_close(network.scores(columns), -distances @ network.similarity.w[0])
    assert (network.similarity.w[0, :-1] != 0).all()  # rank weights are learned from damaged rows
    network, _ = fit(0.0)
    assert (network.similarity.w[0, :-1] == 0).all()
    assert (network.feature_weight != 1).all()


def test_wide_tables_learn_on_fewer_rows(monkeypatch):
    rows = np.random.default_rng(0).normal(size=(100, 3000))
    sizes = []
    inverse = torch.linalg.inv

    def record(matrix):
        sizes.append(len(matrix))
        return inverse(matrix)

    monkeypatch.setattr(torch.linalg, "inv", record)
    monkeypatch.setattr(projection, "SMALL", projection.SMALL._replace(steps=2))
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
    categories = Categories(rows)
    matrix = torch.from_numpy(categories.encode(rows))
    encoding = RowEncoding(matrix, torch.ones(80).double(), [0], knots)
    columns = encoding(matrix)
    cases = columns[:20] if init == "rows" else columns.unflatten(0, (20, 4)).mean(1)
    network = ProjectionNetwork(encoding, cases)
    column_weight = torch.rand(columns.shape[1], generator=torch.Generator().manual_seed(0)).double() + 0.5
    rank_weight = torch.tensor([[0.0, 0.0, 0.7]]).double()
    plain = network.compare(columns, cases, column_weight, rank_weight)
    network.ranked = True
    torch.testing.assert_close(network.compare(columns, cases, column_weight, rank_weight), plain)


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
    monkeypatch.setattr(memory, "SMALL_ROWS", 400)
    monkeypatch.setattr(memory, "LARGE_CASES", 300)
    monkeypatch.setattr(projection, "JUDGED_ROWS", 300)
    monkeypatch.setattr(projection, "LARGE", projection.LARGE._replace(steps=40, rows=256))


def test_large_tables_learn_increasing_functions_of_features(large, monkeypatch):
    rows, labels = skewed(1600)
    model = AdaptiveMemoryClassifier(random_state=0).fit(rows[::2], labels[::2])
    network = model.network_
    assert (len(model.cases_), len(model.history_), network.encoding.ramps) == (300, 40, 31)
    assert model.feature_weights_[0] > 2 * model.feature_weights_[2]
    assert network.column_weight[network.encoding.feature == 1].std() > 0.1
    damaged = AdaptiveMemoryClassifier(100, damage=0.3, random_state=0).fit(rows[:600], labels[:600])
    assert damaged.network_.encoding.ramps == 0
    monkeypatch.setattr(memory, "SMALL_ROWS", 5000)
    small = AdaptiveMemoryClassifier(n_cases=300, random_state=0).fit(rows[::2], labels[::2])
    assert small.network_.encoding.ramps == 0
    scores = [each.score(rows[1::2], labels[1::2]) for each in (model, small)]
    assert scores[0] > max(0.93, scores[1] + 0.01)


def test_large_tables_are_fitted_reproducibly_in_any_units(large):
    rows, target = make_friedman1(600, 6, random_state=0)
    other_units = np.logspace(-6, 6, 6) * rows - 3
    first, again, other = (
        AdaptiveMemoryRegressor(random_state=0).fit(part, target).predict(part) for part in (rows, rows, other_units)
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
