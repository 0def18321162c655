"""The tabular estimators: scikit-learn's own checks, and properties beyond them."""

import io
import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OrdinalEncoder, StandardScaler

import ahop_layers as ah
from ahop_layers.ops.reference import fold
from ahop_layers.tabular import AdaptiveMemoryClassifier, AdaptiveMemoryRegressor
from ahop_layers.tabular.network import Encoding
from ahop_layers.tabular.rows import hold_out, merge_rows

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
SMALL = {"n_cases": 16, "hidden": (16,), "max_epochs": 12, "batch_size": 32, "learning_rate": 0.02, "random_state": 0}
X, Y = load_iris(return_X_y=True)

ESTIMATORS = {
    "classifier": "AdaptiveMemoryClassifier()",
    "regressor": "AdaptiveMemoryRegressor()",
    "neighbors": "AdaptiveNeighborsClassifier(epochs=10, batch_size=64, random_state=0)",
    "blocks": "AdaptiveMemoryClassifier(n_cases=16, hidden=(16,), max_epochs=3, batch_size=32, learning_rate=0.05,"
    " embedding_dim=None, blocks='feature', random_state=0)",
}


def run_apart(code: str) -> Any:
    """Runs code in a process of its own, and returns the JSON that it prints."""
    head = "import json, torch, warnings\nfrom ahop_layers.tabular import *\ntorch.set_num_threads(1)\n"
    # SciPy reads SCIPY_ARRAY_API, without which one check of scikit-learn is skipped, at import.
    done = subprocess.run(
        [sys.executable, "-c", f"{head}warnings.simplefilter('ignore')\n{code}"],
        capture_output=True,
        text=True,
        env={**os.environ, "SCIPY_ARRAY_API": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def fitted() -> AdaptiveMemoryClassifier:
    return AdaptiveMemoryClassifier(**SMALL).fit(X, Y)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_check_of_scikit_learn_passes(name):
    results = run_apart(f"""
from sklearn.utils.estimator_checks import check_estimator
checks = check_estimator({ESTIMATORS[name]}, on_fail=None, on_skip=None)
print(json.dumps([[check["check_name"], check["status"], str(check["exception"])] for check in checks]))
""")
    assert len(results) > 50
    assert [result for result in results if result[1] != "passed" and "pandas is not installed" not in result[2]] == []


@pytest.mark.parametrize("settings", ["", "max_epochs=1"], ids=["projection", "mlp"])
def test_prediction_memory_is_bounded(settings):
    megabytes = run_apart(f"""
import resource
import numpy as np
X = np.random.default_rng(0).normal(size=(30_000, 14))
model = AdaptiveMemoryClassifier({settings}).fit(X[:2000], X[:2000, 0] > 0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model.predict_proba(X)
print(json.dumps((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024))
""")
    assert megabytes < 150  # all scores of 1,024 cases would be 246


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


def test_labels_of_rows_with_zero_weight_are_not_classes():
    model = AdaptiveMemoryClassifier(**SMALL).fit(X, Y, sample_weight=Y != 1)
    assert model.classes_.tolist() == [0, 2]
    assert model.decision_function(X).shape == (150,)


def test_fits_with_the_same_seed_are_equal(fitted):
    again = AdaptiveMemoryClassifier(**SMALL).fit(X, Y)
    assert np.array_equal(again.predict_proba(X), fitted.predict_proba(X))
    other = AdaptiveMemoryClassifier(**{**SMALL, "random_state": 1}).fit(X, Y)
    assert not np.array_equal(other.predict_proba(X), fitted.predict_proba(X))


def test_fits_in_threads_equal_a_fit_alone():
    torch.set_num_threads(1)
    state = torch.get_rng_state()
    alone = AdaptiveMemoryClassifier(**SMALL).fit(X, Y).predict_proba(X)
    with ThreadPoolExecutor(4) as threads:
        models = list(threads.map(lambda _: AdaptiveMemoryClassifier(**SMALL).fit(X, Y), range(4)))
    assert all(np.array_equal(model.predict_proba(X), alone) for model in models)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("similarity", ["adaptive", "kernel"])
def test_a_fit_neither_reads_nor_changes_global_state(monkeypatch, similarity):
    def state():
        return (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), torch.backends.mkldnn.enabled)  # noqa: NPY002

    during, before = [], state()
    monkeypatch.setattr(AdaptiveMemoryClassifier, "_print_epoch", lambda *_: during.append(state()))
    settings = {**SMALL, "max_epochs": 2, "similarity": similarity, "init": "kmeans"}
    first = AdaptiveMemoryClassifier(**settings).fit(X, Y)
    assert during == [before, before]
    torch.manual_seed(1)
    second = AdaptiveMemoryClassifier(**settings).fit(X, Y)
    assert np.array_equal(first.predict_proba(X), second.predict_proba(X))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_fit_on_the_gpu_uses_its_own_generator():
    state = torch.cuda.get_rng_state()
    models = [AdaptiveMemoryClassifier(**SMALL, device="cuda").fit(X, Y) for _ in range(2)]
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert all(model.score(X, Y) > 0.9 for model in models)


def test_nearest_cases_are_training_rows_with_the_largest_weights(fitted):
    cases, weights = fitted.nearest_cases(X[:7], n_nearest=16)
    assert (np.diff(weights, axis=1) <= 0).all()
    np.testing.assert_allclose(weights.sum(1), 1)
    assert np.array_equal(fitted.cases_, X[fitted.case_indices_])
    assert np.array_equal(fitted.case_targets_, Y[fitted.case_indices_])
    scores = fitted.network_.scores(torch.from_numpy(X[:7])).detach().numpy()
    assert (cases[:, 0] == scores.argmax(1)).all()
    own = fitted.nearest_cases(fitted.cases_, 1)[0][:, 0]  # a case has the smallest distance to itself
    assert (fitted.cases_[own] == fitted.cases_).all(1).mean() > 0.9
    for count in (17, 0, 1.5, "a", None, True):
        with pytest.raises(ah.AHopError, match=f"n_nearest must be an integer .* the 16 cases, got {count!r}"):
            fitted.nearest_cases(X, count)


def test_a_fitted_similarity_is_an_ordinary_one(fitted):
    """Training reparametrizes the weights; afterwards they are plain parameters again, as plots expect."""
    similarity = fitted.network_.similarity
    assert isinstance(similarity, ah.AdaptiveSimilarity)
    assert type(similarity.w) is torch.nn.Parameter
    assert (fold(similarity.w).diff() != 0).any()  # at initialization it is constant


def colors_and_sizes() -> tuple[np.ndarray, np.ndarray]:
    """A table of a category with three codes, a constant and a number, and labels that need both."""
    random = np.random.default_rng(0)
    color, size = random.integers(0, 3, 200), random.normal(size=200).round(2)
    return np.column_stack([color, np.ones(200), size]), ((color == 1) & (size > 0)).astype(int)


def by_hand(network: torch.nn.Module, blocks: list[int], rows: np.ndarray) -> np.ndarray:
    """Class probabilities of ``MLP(LayerNorm(score))``, with scores of block sums in a loop over the blocks."""
    columns = network.encoding(torch.from_numpy(rows))
    distance = -(columns[:, None] - network.cases).square()
    numbers = torch.tensor(blocks)
    sums = torch.stack([distance[..., numbers == block].sum(-1) for block in range(max(blocks) + 1)], -1)
    footprints = sums.sort(-1, descending=True).values.cumsum(-1)
    values = network.norm(footprints @ (network.similarity.beta * network.similarity.w[0]))
    return network.mlp[1](network.mlp[0](values).relu()).softmax(-1).detach().numpy()


def test_a_feature_is_a_block_of_its_columns():
    rows, labels = colors_and_sizes()
    model = AdaptiveMemoryClassifier(**SMALL, knots=4, embedding_dim=None, blocks="feature").fit(rows, labels)
    expected = [0, 0, 1, 2, 2, 2]  # 3 codes have 2 ramps between them, the constant has 1, 4 knots have 3
    assert model.network_.similarity.blocks[0].assignment.tolist() == expected
    assert model.network_.similarity.w.shape == (1, 3)
    np.testing.assert_allclose(model.predict_proba(rows), by_hand(model.network_, expected, rows), rtol=1e-9)
    assert model.score(rows, labels) > 0.9


def test_the_columns_of_a_one_hot_category_form_a_block():
    rows, labels = colors_and_sizes()
    encoded = np.column_stack([rows[:, 2], np.eye(3)[rows[:, 0].astype(int)]])
    form = {"knots": None, "embedding_dim": None}
    model = AdaptiveMemoryClassifier(**SMALL, **form, blocks=np.array([0, 1, 1, 1])).fit(encoded, labels)
    np.testing.assert_allclose(model.predict_proba(encoded), by_hand(model.network_, [0, 1, 1, 1], encoded), rtol=1e-9)
    assert model.score(encoded, labels) > 0.9
    same = AdaptiveMemoryClassifier(**SMALL, **form, blocks=torch.tensor([0, 1, 1, 1])).fit(encoded, labels)
    assert np.array_equal(same.predict_proba(encoded), model.predict_proba(encoded))


def test_an_integer_cuts_the_embedding_into_blocks(fitted):
    model = AdaptiveMemoryClassifier(**SMALL, blocks=4).fit(X, Y)
    assert model.network_.similarity.w.shape == (1, 4)
    assert model.score(X, Y) > 0.9
    single = AdaptiveMemoryClassifier(**SMALL, blocks=np.int64(8)).fit(X, Y)
    assert np.array_equal(single.predict_proba(X), fitted.predict_proba(X))


def test_a_list_of_blocks_has_several_resolutions():
    model = AdaptiveMemoryClassifier(**SMALL, blocks=[None, 4]).fit(X, Y)
    similarity = model.network_.similarity
    assert (similarity.w_0.shape, similarity.w_1.shape) == ((1, 8), (1, 4))
    assert model.score(X, Y) > 0.9
    rows, labels = colors_and_sizes()
    both = AdaptiveMemoryClassifier(**SMALL, knots=4, embedding_dim=None, blocks=["feature", 2]).fit(rows, labels)
    first, second = both.network_.similarity.blocks
    assert (first.assignment.tolist(), second.assignment) == ([0, 0, 1, 2, 2, 2], 2)


def test_estimators_with_blocks_are_copied():
    rows, labels = colors_and_sizes()
    for blocks in ("feature", np.array([0, 1, 0]), ["feature", None]):
        model = AdaptiveMemoryClassifier(**SMALL, embedding_dim=None, blocks=blocks).fit(rows, labels)
        again = clone(model).fit(rows, labels)
        for copy in (again, pickle.loads(pickle.dumps(model))):
            assert np.array_equal(copy.predict_proba(rows), model.predict_proba(rows))
        assert np.array_equal(again.blocks, blocks)
        assert "blocks" in repr(model)
    search = GridSearchCV(AdaptiveMemoryClassifier(**SMALL, embedding_dim=None), {"blocks": [None, "feature"]}, cv=2)
    assert search.fit(rows, labels).best_params_["blocks"] in (None, "feature")


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
    search = GridSearchCV(model, {"adaptivememoryclassifier__n_cases": [8, 16]}, cv=2).fit(rows, Y)
    assert search.best_params_["adaptivememoryclassifier__n_cases"] in (8, 16)


def test_a_constant_feature_has_no_effect():
    rows = np.random.default_rng(0).normal(size=(1000, 2))
    labels = rows.sum(1) > 0
    constant = np.full((1000, 1), 0.1)
    model = AdaptiveMemoryClassifier(**SMALL, knots=None).fit(np.hstack([rows, constant]), labels)
    expected = model.predict_proba(np.hstack([rows, constant]))
    np.testing.assert_array_equal(model.predict_proba(np.hstack([rows, constant + 5])), expected)


def test_numpy_integers():
    sizes = {"n_cases": 16, "batch_size": 32, "max_epochs": 2, "patience": 2, "embedding_dim": 4, "knots": 8}
    plain = AdaptiveMemoryClassifier(**{**SMALL, **sizes, "hidden": (16, 8)}).fit(X, Y)
    sizes = {name: np.int64(size) for name, size in sizes.items()} | {"hidden": np.array([16, 8])}
    model = AdaptiveMemoryClassifier(**{**SMALL, **sizes}).fit(X, Y)
    assert np.array_equal(model.predict_proba(X), plain.predict_proba(X))


def test_pandas_in():
    pandas = pytest.importorskip("pandas")
    frame, labels = pandas.DataFrame(X, columns=list("abcd")), pandas.Series(Y).map({0: "x", 1: "y", 2: "z"})
    model = AdaptiveMemoryClassifier(**SMALL).fit(frame, labels)
    assert model.feature_names_in_.tolist() == list("abcd")
    assert set(model.predict(frame)) <= {"x", "y", "z"}
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[list("badc")])


@pytest.mark.parametrize(("rows", "labels", "message"), [
    (np.where(X > 7, np.inf, X), Y, "contains infinity"),
    (X, np.zeros(150), "one class"),
    (X[:0], Y[:0], "0 sample"),
    (X, Y[:-1], "inconsistent numbers of samples"),
], ids=["infinity", "one class", "empty", "lengths"])  # fmt: skip
def test_bad_rows_raise_the_errors_of_scikit_learn(rows, labels, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveMemoryClassifier(**SMALL).fit(rows, labels)


def test_a_wrong_number_of_features(fitted):
    with pytest.raises(ValueError, match="X has 3 features, but AdaptiveMemoryClassifier is expecting 4"):
        fitted.predict(X[:, :3])


@pytest.mark.parametrize(("settings", "message"), [
    ({"n_cases": 0}, "n_cases must be an integer of at least 1, got 0"),
    ({"n_cases": "a"}, "n_cases must be an integer of at least 1, got 'a'"),
    ({"n_cases": None}, "n_cases must be an integer of at least 1, got None"),
    ({"max_epochs": 2.5}, "max_epochs must be an integer of at least 1, got 2.5"),
    ({"max_epochs": True}, "max_epochs must be an integer of at least 1, got True"),
    ({"batch_size": "a"}, "batch_size must be an integer of at least 1 or None, got 'a'"),
    ({"patience": -1}, "patience must be an integer of at least 1 or None, got -1"),
    ({"embedding_dim": 0}, "embedding_dim must be an integer of at least 1 or None, got 0"),
    ({"knots": 1}, "knots must be an integer of at least 2 or None, got 1"),
    ({"hidden": 5}, "hidden must be a sequence of integers of at least 1, got 5"),
    ({"hidden": "ab"}, "hidden must be a sequence of integers of at least 1, got 'ab'"),
    ({"hidden": (16, 0)}, r"hidden must be a sequence of integers of at least 1, got \(16, 0\)"),
    ({"similarity": "cosine"}, "similarity must be one of adaptive, dot, kernel, got 'cosine'"),
    ({"similarity": 5}, "similarity must be one of adaptive, dot, kernel, got 5"),
    ({"bases": ("cosine",)}, r"bases must be .*, got \('cosine',\)"),
    ({"blocks": "features"}, "blocks must be one of feature, got 'features'"),
    ({"blocks": []}, "blocks must have at least one entry, got none"),
    ({"blocks": [2, "feature"]}, "blocks of features need embedding_dim=None, .* got embedding_dim=8"),
    ({"blocks": 0}, "blocks must be an integer of at least 1, got 0"),
    ({"blocks": 3}, "blocks must divide d = 8: expected one of 1, 2, 4, 8, got 3"),
    ({"blocks": 2.0}, "blocks must be None, an integer, .* got 2.0"),
    ({"blocks": (4, 2.5)}, r"an entry of blocks must be None, an integer, .* got 2.5"),
    ({"blocks": "feature"}, "blocks of features need embedding_dim=None, .* got embedding_dim=8"),
    ({"blocks": np.arange(4)}, "blocks of features need embedding_dim=None, .* got embedding_dim=8"),
    ({"blocks": np.arange(3), "embedding_dim": None}, "blocks must name the block of each of the 4 features, got 3"),
    ({"blocks": np.array([0, 2, 2, 0]), "embedding_dim": None}, "blocks must use every number .* got the numbers 0, 2"),
    ({"blocks": np.ones(4), "embedding_dim": None}, "blocks must have an integer dtype, got torch.float64"),
    ({"blocks": 4, "similarity": "dot"}, "blocks needs similarity='adaptive', got similarity='dot'"),
    ({"init": "center"}, "init must be one of rows, kmeans, got 'center'"),
    ({"loss": "hinge"}, "loss must be one of auto, log, squared, got 'hinge'"),
    ({"learning_rate": 0}, "learning_rate must be a positive number, got 0"),
    ({"learning_rate": "a"}, "learning_rate must be a positive number, got 'a'"),
    ({"learning_rate": None}, "learning_rate must be a positive number, got None"),
    ({"learning_rate": np.inf}, "learning_rate must be a positive number, got inf"),
    ({"weight_decay": -1}, "weight_decay must be a number of at least 0, got -1"),
    ({"weight_decay": "a"}, "weight_decay must be a number of at least 0, got 'a'"),
    ({"dropout": 2}, "dropout must be a number of at least 0 and below 1, got 2"),
    ({"dropout": "a"}, "dropout must be a number of at least 0 and below 1, got 'a'"),
    ({"validation_fraction": 1.0}, "validation_fraction must be a number of at least 0 and below 1, got 1.0"),
    ({"validation_fraction": (0.1, 0.2)}, "validation_fraction must be a number of at least 0 and below 1, got"),
    ({"device": "nonsense"}, "device must be 'auto' or an available PyTorch device, got 'nonsense'"),
    ({"device": "meta"}, "device must be 'auto' or an available PyTorch device, got 'meta'"),
    ({"device": []}, r"device must be 'auto' or an available PyTorch device, got \[\]"),
], ids=str)  # fmt: skip
def test_bad_parameters(settings, message):
    with pytest.raises(ah.AHopError, match=message):
        AdaptiveMemoryClassifier(**{**SMALL, **settings}).fit(X, Y)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda():
    with pytest.raises(ah.AHopError, match="device must be 'auto' or an available PyTorch device, got 'cuda'"):
        AdaptiveMemoryClassifier(**SMALL, device="cuda").fit(X, Y)


def test_bad_weights():
    for weight in (np.zeros(150), -np.ones(150), np.ones((150, 2)), np.full(150, 1e308)):
        with pytest.raises(ah.AHopError, match="sample_weight must be one number per row"):
            AdaptiveMemoryClassifier(**SMALL).fit(X, Y, sample_weight=weight)


@pytest.mark.parametrize("scale", [1e300, 1e-300])
def test_targets_whose_variance_leaves_float64_are_refused(scale):
    rows, target = load_diabetes(return_X_y=True)
    with pytest.raises(ah.AHopError, match="y must have a variance within the range of float64, got targets from"):
        AdaptiveMemoryRegressor(**SMALL).fit(rows, target * scale)


@pytest.mark.parametrize("scale", [1e100, 1e-100])
def test_large_and_small_targets_are_standardized(scale):
    rows, target = load_diabetes(return_X_y=True)
    plain, scaled = (AdaptiveMemoryRegressor(**SMALL).fit(rows, target * each) for each in (1.0, scale))
    np.testing.assert_allclose(scaled.predict(rows), scale * plain.predict(rows), rtol=1e-3)


@pytest.mark.parametrize("value", [0.1, 1e-310, 1e200])
def test_a_constant_target_is_predicted(value):
    model = AdaptiveMemoryRegressor(**SMALL).fit(X, np.full(150, value))
    np.testing.assert_allclose(model.predict(X), value, atol=0.05)


@pytest.mark.parametrize(("knots", "large"), [(None, 1e200), (24, 1.7e308)])
def test_features_that_overflow_are_named(knots, large):
    rows = X.copy()
    rows[:, 2] = np.where(Y == 1, large, -large)
    with pytest.raises(ah.AHopError, match="X must have a finite range and variance in float64, got feature 2"):
        AdaptiveMemoryClassifier(**SMALL, knots=knots).fit(rows, Y)


def test_a_diverging_fit_raises_and_leaves_the_fitted_estimator():
    model = AdaptiveMemoryClassifier(**SMALL).fit(X, Y)
    before = vars(model).copy()
    with pytest.raises(ah.AHopError, match=r"the loss must stay finite, got .* with learning_rate=1e\+30"):
        model.set_params(learning_rate=1e30).fit(X, Y)
    assert {**vars(model), "learning_rate": 0.02} == before
    fresh = AdaptiveMemoryClassifier(**{**SMALL, "learning_rate": 1e30})
    with pytest.raises(ah.AHopError):
        fresh.fit(X, Y)
    with pytest.raises(NotFittedError):
        fresh.predict(X)


def test_there_is_no_partial_fit(fitted):
    assert not hasattr(fitted, "partial_fit")
    with pytest.raises(AttributeError, match=r"has no partial_fit, .* use fit"):
        fitted.partial_fit(X, Y)


def test_verbose_and_early_stopping(capsys):
    rows, labels = load_breast_cancer(return_X_y=True)
    model = AdaptiveMemoryClassifier(**{**SMALL, "max_epochs": 60}, patience=2, verbose=True).fit(rows, labels)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(model.history_) < 60
    assert "held out" in lines[0]
    assert np.argmin(model.history_) == len(model.history_) - 3  # two epochs without improvement, then it stops


def test_held_out_rows_are_stratified():
    target = np.repeat([0, 1, 2], [700, 200, 100])
    held = hold_out(target, 0.1, np.random.RandomState(0))
    assert len(set(held)) == 100
    assert np.bincount(target[held]).tolist() == [70, 20, 10]
    assert len(hold_out(target[:99], 0.1, np.random.RandomState(0))) == 0


def test_equal_rows_are_merged():
    rows = merge_rows(np.array([[2.0], [1.0], [2.0], [3.0]]), np.array([0, 1, 0, 1]), [1, 2, 3, 0])
    assert rows.X.tolist() == [[2], [1]]
    assert rows.target.tolist() == [0, 1]
    assert rows.indices.tolist() == [0, 1]
    np.testing.assert_allclose(rows.weight, [4 / 3, 2 / 3])


def test_ramps_are_linear_between_knots_and_have_a_knot_at_each_of_few_values():
    rows = torch.tensor([[0.0, 5.0], [1.0, 5.0], [4.0, 5.0]]).double().repeat(32, 1)
    encoding = Encoding.ramps(rows, torch.ones(96).double(), knots=8)
    assert encoding.column.tolist() == [0, 0, 1]
    columns = encoding(torch.tensor([[0.0, 5.0], [0.5, 7.0], [4.0, 5.0], [9.0, 5.0]]).double()) + encoding.center
    assert columns.tolist() == [[0, 0, 0], [0.5, 0, 0], [1, 1, 0], [1, 1, 0]]
    torch.testing.assert_close(encoding(rows).mean(0), torch.zeros(3))
