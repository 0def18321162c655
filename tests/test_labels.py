"""Labels of a memory: class scores, classification, storage and errors."""

import copy

import numpy as np
import pytest
import torch

from ahop_layers.errors import AHopError
from ahop_layers.memory import scoring
from ahop_layers.memory.losses import label_loss
from ahop_layers.memory.memory import AssociativeMemory
from ahop_layers.memory.presets import PRESETS
from ahop_layers.variants import Noisy

LABELS = torch.arange(61) ** 2 % 17 * 3 - 5  # nine classes, not consecutive, some negative


def full_class_scores(memory, x):
    """The definition, from all scores."""
    scores = memory.scores(x)
    return torch.stack([scores[..., memory.labels == label].logsumexp(-1) for label in LABELS.unique()], -1)


@pytest.fixture(params=[1, 7, 60, 61, 2**21], ids=lambda size: f"block{size}")
def block(request, monkeypatch):
    """Patterns per block, for patterns of eight dimensions."""
    monkeypatch.setattr(scoring, "BLOCK_ELEMENTS", 8 * request.param)


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("prior", [False, True])
def test_class_scores_are_the_log_sum_exp_of_a_class(block, scale, prior, monkeypatch):
    monkeypatch.setattr(scoring, "QUERY_ROWS", 9)
    memory = AssociativeMemory.preset("A-Hop", scale * torch.randn(61, 8).double(), labels=LABELS, prior=prior)
    if prior:
        torch.nn.init.normal_(memory.prior, std=5.0)
    x = scale * torch.randn(23, 8).double()
    expected = full_class_scores(memory, x)
    torch.testing.assert_close(memory.class_scores(x), expected)
    assert torch.equal(memory.classify(x), LABELS.unique()[expected.argmax(-1)])
    assert torch.equal(memory.classes, LABELS.unique())


def test_class_scores_have_gradients(block):
    memory = AssociativeMemory.preset("A-Hop", torch.randn(61, 8).double(), labels=LABELS, prior=True)
    x = torch.randn(3, 8).double().requires_grad_()
    weights = torch.randn(3, 9).double()
    inputs = [x, *memory.parameters()]
    got = torch.autograd.grad((memory.class_scores(x) * weights).sum(), inputs)
    expected = torch.autograd.grad((full_class_scores(memory, x) * weights).sum(), inputs)
    for each, other in zip(got, expected, strict=True):
        torch.testing.assert_close(each, other)


@pytest.mark.parametrize("value", [-float("inf"), float("inf")])
def test_infinite_scores(value):
    memory = AssociativeMemory(torch.eye(4), labels=[0, 0, 1, 1], prior=True)
    with torch.no_grad():
        memory.prior[:2] = value
    assert memory.class_scores(torch.zeros(4)).tolist() == pytest.approx([value, np.log(2)])
    assert memory.classify(torch.zeros(4)) == (value < 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    memory = AssociativeMemory(torch.zeros(4097, 8, dtype=dtype), labels=torch.arange(4097) % 2)
    scores = memory.class_scores(torch.zeros(8, dtype=dtype))
    assert scores.dtype == dtype
    assert torch.equal(scores, torch.tensor([2049.0, 2048.0]).log().to(dtype))


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 8), (0, 8)])
def test_leading_dimensions_and_numpy(shape):
    memory = AssociativeMemory(torch.randn(61, 8), labels=LABELS.numpy())
    array = np.random.default_rng(0).normal(size=shape)
    scores, found = memory.class_scores(array), memory.classify(array)
    assert isinstance(scores, np.ndarray)
    assert isinstance(found, np.ndarray)
    assert scores.shape == (*shape[:-1], 9)
    np.testing.assert_array_equal(scores, memory.class_scores(torch.from_numpy(array)).numpy())
    np.testing.assert_array_equal(found, memory.classify(torch.from_numpy(array)).numpy())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_accept_labels(name):
    patterns = 5 * torch.randn(61, 64).sign()
    memory = AssociativeMemory.preset(name, patterns, labels=LABELS)
    assert torch.equal(memory.classify(patterns), LABELS)


@pytest.mark.parametrize(
    "labels",
    [
        [3, 1, 2],
        (3, 1, 2),
        np.array([3, 1, 2], np.uint8),
        np.array([2, 1, 3])[::-1],
        torch.tensor([3, 1, 2], dtype=torch.int32),
        torch.tensor([3, 1, 2]),
    ],
)
def test_labels_are_copied_to_int64(labels, recwarn):
    if isinstance(labels, np.ndarray):
        labels.flags.writeable = False
    memory = AssociativeMemory(torch.eye(3), labels=labels)
    assert memory.labels.dtype == torch.int64
    assert memory.labels.tolist() == [3, 1, 2]
    assert not recwarn.list
    memory.labels[0] = 9
    assert labels[0] == 3
    assert memory.half().double().labels.dtype == torch.int64


def test_classes_follow_changes_of_the_labels():
    memory = AssociativeMemory(torch.eye(3), labels=[0, 1, 1])
    assert memory.classes.tolist() == [0, 1]
    memory.labels[2] = 5
    assert memory.classify(torch.eye(3)).tolist() == [0, 1, 5]
    memory.labels = torch.tensor([7, 7, 8])
    assert memory.classify(torch.eye(3)).tolist() == [7, 7, 8]
    other = copy.deepcopy(memory)
    other.labels.zero_()
    assert memory.classes.tolist() == [7, 8]


def test_inference_mode_keeps_later_gradients():
    with torch.inference_mode():
        made = AssociativeMemory(torch.eye(3), labels=[0, 1, 1])
        assert made.classify(torch.eye(3)).tolist() == [0, 1, 1]
    memory = AssociativeMemory(torch.eye(3), labels=[0, 1, 1], prior=True)
    with torch.inference_mode():
        memory.classify(torch.eye(3))
    memory.class_scores(torch.eye(3)).sum().backward()
    assert memory.prior.grad is not None


def test_add_and_remove_keep_labels_and_patterns_together():
    memory = AssociativeMemory(torch.eye(4)[:2], labels=[5, 6])
    memory.add(torch.eye(4)[2:], labels=np.array([7, 5]))
    assert memory.classify(torch.eye(4) * 9).tolist() == [5, 6, 7, 5]
    memory.remove([0, 1])
    assert memory.labels.tolist() == [7, 5]
    for labels, message in (
        (None, "labels must be given: the memory has labels, got none"),
        ([1], r"labels must be \(N,\) = \(2,\), one for each pattern, got \(1,\)"),
        ([1.0, 2.0], "labels must be integers"),
    ):
        with pytest.raises(AHopError, match=message):
            memory.add(torch.eye(4)[2:], labels=labels)
        assert len(memory.patterns) == len(memory.labels) == 2
    plain = AssociativeMemory(torch.eye(4))
    with pytest.raises(AHopError, match="labels must not be given: the memory has none, got labels"):
        plain.add(torch.eye(4), labels=[1, 2, 3, 4])
    assert len(plain.patterns) == 4


@pytest.mark.parametrize("assign", [False, True])
def test_labels_are_saved_and_loaded(tmp_path, assign):
    memory = AssociativeMemory.preset("A-Hop", torch.randn(61, 8), labels=LABELS, prior=True)
    torch.save(memory.state_dict(), tmp_path / "memory.pt")
    other = AssociativeMemory.preset("A-Hop", torch.randn(2, 8), labels=[0, 1], prior=True)
    other.load_state_dict(torch.load(tmp_path / "memory.pt", weights_only=True), assign=assign)
    x = torch.randn(5, 8)
    assert torch.equal(other.labels, LABELS)
    assert torch.equal(other.class_scores(x), memory.class_scores(x))
    other.labels.zero_()
    assert torch.equal(memory.labels, LABELS)


def test_a_checkpoint_without_labels_loads_into_a_memory_without_labels():
    memory = AssociativeMemory(torch.eye(3))
    assert set(memory.state_dict()) == {"patterns", "beta"}
    memory.load_state_dict({"patterns": torch.ones(2, 3)})
    assert memory.labels is None
    labeled = AssociativeMemory(torch.eye(3), labels=[0, 1, 1])
    with pytest.raises(RuntimeError, match=r'Unexpected key.* "labels"'):
        memory.load_state_dict(labeled.state_dict())
    assert len(memory.patterns) == 2


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_a_failed_load_keeps_the_labels(strict, assign):
    memory = AssociativeMemory(torch.eye(3), labels=[0, 1, 1])
    patterns = torch.ones(2, 3)
    for state, message in (
        ({"patterns": patterns}, "labels must be in the state dict, because the memory has labels, got none"),
        ({"patterns": patterns, "labels": torch.zeros(3).long()}, r"labels must be \(N,\) = \(2,\)"),
        ({"patterns": patterns, "labels": torch.zeros(2)}, "labels must be integers .* got torch.float32"),
    ):
        with pytest.raises(AHopError, match=message):
            memory.load_state_dict(state, strict=strict, assign=assign)
        assert torch.equal(memory.patterns, torch.eye(3))
        assert memory.labels.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: AssociativeMemory(p).classify(p), "the memory must have labels, got none"),
        (lambda p: AssociativeMemory(p).class_scores(p), "the memory must have labels, got none"),
        (lambda p: AssociativeMemory(p).classes, "the memory must have labels, got none"),
        (lambda p: AssociativeMemory(p, labels=[1, 2]), r"labels must be \(N,\) = \(6,\), .* got \(2,\)"),
        (lambda p: AssociativeMemory(p, labels=3), r"labels must be \(N,\) = \(6,\), .* got \(\)"),
        (lambda p: AssociativeMemory(p, labels=p[:, 0]), r"labels must be integers \(N,\), .* got torch.float32"),
        (lambda p: AssociativeMemory(p, labels=p[:, 0] > 0), r"labels must be integers \(N,\), .* got torch.bool"),
        (lambda p: AssociativeMemory(p, labels="abcdef"), r"labels must be integers \(N,\), .* got str"),
        (lambda p: AssociativeMemory(p, labels=np.array(["a"] * 6)), r"labels must be integers \(N,\), .* got <U1"),
        (lambda p: AssociativeMemory(p, labels=[None] * 6), r"labels must be integers \(N,\), .* got list"),
        (lambda p: AssociativeMemory.preset("M-Hop", p, labels=[1]), r"labels must be \(N,\) = \(6,\)"),
        (lambda p: AssociativeMemory(p, labels=range(6)).classify(p[:, :3]), "queries x must be .* the d = 4 of the"),
    ],
)
def test_errors(make, message):
    with pytest.raises(AHopError, match=message):
        make(torch.rand(6, 4))


def clusters(count, seed):
    """Classes that differ in the first four dimensions alone; the others are noise of a larger variance."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=generator)
    x = 4 * torch.randn(count, 16, generator=generator)
    x[:, :4] = labels[:, None] * 3.0 + 0.3 * torch.randn(count, 4, generator=generator)
    return x, labels * 10 + 1


class Weighted(torch.nn.Module):
    """The negative squared distance with a weight for each dimension."""

    def __init__(self):
        super().__init__()
        self.log_weight = torch.nn.Parameter(torch.full((16,), -3.0))

    def forward(self, query, key):
        scale = (self.log_weight / 2).exp()
        return -torch.cdist(query * scale, key * scale).square()


@pytest.mark.parametrize("kind", ["pairs", "variant"])
def test_fit_by_label_learns_what_classes_have_in_common(kind):
    (patterns, labels), (queries, asked), (x, y) = clusters(60, 0), clusters(600, 1), clusters(500, 2)
    memory = AssociativeMemory(patterns, Weighted(), labels=labels)
    before = (memory.classify(x) == y).float().mean()
    data = (asked, queries) if kind == "pairs" else Noisy(0.1)
    losses = memory.fit(data, epochs=60, batch=100, by="label", progress=False)
    assert losses[-5:].mean() < 0.5 * losses[:5].mean()
    assert (memory.classify(x) == y).float().mean() > max(0.95, before + 0.05)
    assert memory.similarity.log_weight[:4].min() > memory.similarity.log_weight[4:].max()


def test_the_label_loss_leaves_a_pattern_out_of_its_own_memory(block):
    labels = LABELS.clone()
    labels[50] = 1000  # the only one of its class
    memory = AssociativeMemory.preset("A-Hop", torch.randn(61, 8).double(), labels=labels, prior=True)
    index, query = torch.tensor([0, 13, 50, 60, 13]), torch.randn(5, 8).double()
    scores = memory.scores(query)
    expected = []
    for row, place in zip(scores, index.tolist(), strict=True):
        kept = (torch.arange(61) != place) | (place == 50)
        of_class = kept & (labels == labels[place])
        expected.append(row[kept].logsumexp(-1) - row[of_class].logsumexp(-1))
    expected = torch.stack(expected).mean()
    loss = label_loss(memory._logit_blocks(query), index, memory._given_classes())
    torch.testing.assert_close(loss, expected)
    inputs = list(memory.parameters())
    pairs = zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True)
    for got, other in pairs:
        torch.testing.assert_close(got, other)


def test_the_bias_of_labeled_pairs_is_estimated_from_the_mean_of_a_class():
    patterns = torch.randn(40, 8).double()
    labels, bias = torch.arange(40) % 4, torch.linspace(-1, 1, 8).double()
    memory = AssociativeMemory.preset("A-Hop", patterns, labels=labels, debias=True)
    means = torch.stack([patterns[labels == label].mean(0) for label in range(4)])
    asked = torch.arange(400) % 4
    memory.fit((asked, means[asked] + bias), epochs=1, batch=400, lr=1e-9, by="label", progress=False)
    torch.testing.assert_close(memory.similarity.bias.detach(), bias, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("fit", "message"),
    [
        (lambda m, p: m.fit(Noisy(0.1), by="class"), "by must be one of pattern, label, got 'class'"),
        (lambda m, p: m.fit(([0, 3], p[:2]), by="label"), "labels of data must be labels of stored patterns, got 3"),
        (
            lambda m, p: m.fit(([0, 1], p), by="label"),
            r"labels of data must be \(N,\) = \(6,\), one for each query",
        ),
        (lambda m, p: m.fit(([0.5], p[:1]), by="label"), "labels of data must be integers .* got torch.float32"),
        (lambda m, p: m.fit((torch.zeros(0).long(), p[:0]), by="label"), "data must be index .* n >= 1"),
        (lambda m, p: m.fit((torch.zeros(2).long(), p[:2, :3]), by="label"), "data must be index .* with d = 4"),
        (lambda m, p: m.fit(None, by="label"), "data must be a variant or a pair .* got NoneType"),
        (lambda m, p: m.fit(([0], None), by="label"), "query must be a tensor, got NoneType"),
        (lambda m, p: AssociativeMemory(p, "adaptive").fit(Noisy(0.1), by="label"), "the memory must have labels"),
        (
            lambda m, p: AssociativeMemory.preset("K-Hop", p, labels=range(6)).fit(by="label"),
            "by='label' needs a memory with objective='retrieval'",
        ),
    ],
)
def test_errors_of_a_fit_by_label(fit, message):
    patterns = torch.rand(6, 4)
    memory = AssociativeMemory(patterns, "adaptive", labels=[0, 1, 2, 0, 1, 2])
    with pytest.raises(AHopError, match=message):
        fit(memory, patterns)
