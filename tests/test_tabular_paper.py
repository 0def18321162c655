"""The memories with the MLP of the paper, which the tabular benchmark compares."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_iris

import ahop_layers as ah
from ahop_layers.ops.reference import fold
from benchmarks.paper.tabular.estimator import PaperMemoryClassifier
from benchmarks.paper.tabular.network import Encoding
from benchmarks.paper.tabular.training import hold_out

pytestmark = pytest.mark.slow
SMALL = {"n_cases": 16, "hidden": (16,), "max_epochs": 12, "batch_size": 32, "learning_rate": 0.02, "random_state": 0}
X, Y = load_iris(return_X_y=True)


@pytest.mark.parametrize("settings", [
    {}, {"similarity": "dot"}, {"similarity": "kernel", "init": "kmeans"}, {"blocks": [None, 4]},
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
        assert (fold(getattr(similarity, similarity.parameter_names()[0][0])).diff() != 0).any()  # constant at first


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
