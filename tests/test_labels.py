"""Labels of a memory: class scores, classification, storage and errors."""

import copy

import numpy as np
import pytest
import torch

from ahop_layers.memory import AssociativeMemory
from ahop_layers.memory import state as state_module
from ahop_layers.memory.variants import Noisy
from ahop_layers.similarity.adaptive import AdaptiveSimilarity
from tests.samples import refuses

LABELS = torch.arange(61) ** 2 % 17 * 3 - 5  # nine classes, not consecutive, some negative


@pytest.fixture(params=[7, 2**21], ids=lambda size: f"chunk{size}")
def chunk(request, monkeypatch):
    """Patterns per chunk, for patterns of eight dimensions."""
    monkeypatch.setattr(state_module, "CHUNK_ELEMENTS", 8 * request.param)


def check_gradients(got, expected, inputs):
    torch.testing.assert_close(torch.autograd.grad(got, inputs), torch.autograd.grad(expected, inputs))


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_class_scores_are_the_log_sum_exp_of_a_class(chunk, scale, monkeypatch):
    monkeypatch.setattr(state_module, "QUERIES_AT_ONCE", 9)
    memory = AssociativeMemory(scale * torch.randn(61, 8).double(), "adaptive", labels=LABELS)
    x, classes = (scale * torch.randn(23, 8).double()).requires_grad_(), LABELS.unique()
    full, scores = memory.scores(x), memory.class_scores(x)
    expected = torch.stack([full[:, label == LABELS].logsumexp(-1) for label in classes], -1)
    torch.testing.assert_close(scores, expected)
    weights = torch.randn(23, 9).double()
    check_gradients((scores * weights).sum(), (expected * weights).sum(), [x, *memory.parameters()])
    assert torch.equal(memory.classify(x), classes[expected.argmax(-1)])
    assert torch.equal(memory.classes, classes)


@pytest.mark.parametrize("kind", [tuple, np.array, lambda labels: np.uint8(labels)[::-1][::-1], torch.tensor, "pandas"])
def test_labels_are_copied_to_int64(kind, recwarn):
    if kind == "pandas":
        kind = pytest.importorskip("pandas").Series
        assert AssociativeMemory(torch.eye(3), labels=kind(["a", "b", "a"])).labels == ["a", "b", "a"]
    labels = kind([3, 1, 2])
    if isinstance(labels, np.ndarray):
        labels.flags.writeable = False
    memory = AssociativeMemory(torch.eye(3), labels=labels)
    assert memory.labels.dtype == torch.int64
    assert memory.labels.tolist() == [3, 1, 2]
    assert not recwarn.list
    memory.labels[0] = 9
    assert labels[0] == 3
    assert memory.half().double().labels.dtype == torch.int64
    memory.add(torch.eye(3), labels=labels)
    assert memory.labels.tolist() == [9, 1, 2, 3, 1, 2]


def test_infinite_scores_and_scores_of_half_precision():
    for value in (-float("inf"), float("inf")):
        memory = AssociativeMemory(
            torch.eye(4),
            lambda query, key, value=value: value * key[:, :2].sum(1)[None],
            labels=[0, 0, 1, 1],
            check=False,
        )
        scores = memory.class_scores(torch.zeros(4)).tolist()
        assert scores[0] == value
    memory = AssociativeMemory(torch.zeros(4097, 8).half(), "dot", labels=torch.arange(4097) % 2)
    scores = memory.class_scores(torch.zeros(8))
    assert torch.equal(scores, torch.tensor([2049.0, 2048.0]).log().half())  # summed in float32
    memory = AssociativeMemory(torch.eye(3).half() * 100, "dot", labels=[4, 5, 6], beta=1e3)
    assert memory.classify(torch.tensor([[50.0, 100.0, 75.0]])) == 5  # compared in float32


def test_classes_are_those_of_the_memory_in_inference_mode_too():
    memory = AssociativeMemory(torch.eye(3), labels=[7, 7, 8])
    copy.deepcopy(memory).labels.zero_()
    assert memory.classes.tolist() == [7, 8]
    with torch.inference_mode():
        for each in (memory, AssociativeMemory(torch.eye(3), labels=[7, 7, 8])):
            assert each.classify(torch.eye(3)).tolist() == [7, 7, 8]
    x = torch.eye(3).requires_grad_()
    memory.class_scores(x).sum().backward()  # inference mode keeps later gradients
    assert x.grad is not None


def test_names_of_classes_stay_in_order(tmp_path):
    memory = AssociativeMemory(torch.eye(3), labels=["cat", "dog", "dog"])
    memory.add(torch.ones(1, 3), labels=["ant"])
    assert memory.classes == ["ant", "cat", "dog"]
    assert memory.labels == ["cat", "dog", "dog", "ant"]
    pytest.importorskip("safetensors", reason="memories are saved with safetensors")
    memory.save(tmp_path / "memory.safetensors")
    loaded = AssociativeMemory.load(tmp_path / "memory.safetensors")
    assert torch.equal(loaded.class_scores(torch.eye(3)), memory.class_scores(torch.eye(3)))


def test_a_checkpoint_without_labels_loads_into_a_memory_without_labels():
    memory = AssociativeMemory(torch.eye(3), "dot")
    memory.load_state_dict(AssociativeMemory(torch.ones(2, 3), "dot").state_dict())
    assert memory.labels is None
    labeled = AssociativeMemory(torch.eye(3), "dot", labels=[0, 1, 1])
    message = "labels must not be in the state dict: the memory has none"
    refuses(message, memory.load_state_dict, labeled.state_dict())
    assert len(memory.patterns) == 2


@pytest.mark.usefixtures("small_fit")
def test_the_bias_of_labeled_pairs_is_estimated_from_the_mean_of_a_class():
    patterns = torch.randn(40, 8).double()
    labels, bias = torch.arange(40) % 4, torch.linspace(-1, 1, 8).double()
    memory = AssociativeMemory(patterns, AdaptiveSimilarity(8, debias=True).double(), labels=labels)
    means = torch.stack([patterns[labels == label].mean(0) for label in range(4)])
    asked = torch.arange(400) % 4
    memory.fit((asked, means[asked] + bias), by="label")
    torch.testing.assert_close(memory.similarity.bias.detach(), bias, atol=1e-6, rtol=0)


NO_LABELS = "the memory must have labels"
SHAPE, KIND = r"labels must be \(N,\) = \(6,\)", r"labels must be integers or strings \(N,\)"


@pytest.mark.parametrize(("call", "message"), [
    (lambda m, p: AssociativeMemory(p).classify(p), f"{NO_LABELS}, got none"),
    (lambda m, p: AssociativeMemory(p, "adaptive").fit(Noisy(0.1), by="label"), NO_LABELS),
    (lambda m, p: AssociativeMemory(p).add(p, labels=range(6)), "labels must not be given: the memory has none"),
    (lambda m, p: m.add(p), "labels must be given: the memory has labels, got none"),
    (lambda m, p: m.add(p, labels=[1]), rf"{SHAPE}, one for each pattern, got \(1,\)"),
    (lambda m, p: AssociativeMemory(p, labels=3), rf"{SHAPE}, .* got \(\)"),
    (lambda m, p: AssociativeMemory(p, "dot", labels=[1, 2]), rf"{SHAPE}, .* got \(2,\)"),
    (lambda m, p: AssociativeMemory(p, labels=p[:, 0] > 0), f"{KIND}, .* got torch.bool"),
    (lambda m, p: AssociativeMemory(p, labels="abcdef"), "labels must be a sequence, got str"),
    (lambda m, p: AssociativeMemory(p, labels=[None] * 6), f"{KIND}, .* got others"),
    (lambda m, p: m.add(p, labels=["a"] * 6), "labels must be integers, as those stored, got strings"),
    (lambda m, p: m.fit(([0, 3], p[:2]), by="label"), "labels of damage must be labels of stored patterns, got 3"),
    (lambda m, p: m.fit(([0, 1], p), by="label"), r"labels of damage must be \(N,\) = \(6,\), one for each query"),
    (lambda m, p: m.fit(([0.5], p[:1]), by="label"), "labels of damage must be integers .* got torch.float32"),
    (lambda m, p: m.fit((["a"], p[:1]), by="label"), "labels of damage must be integers, as those stored"),
    (lambda m, p: m.fit((torch.zeros(0).long(), p[:0]), by="label"), "damage must be index .* n >= 1"),
    (lambda m, p: m.fit((torch.zeros(2).long(), p[:2, :3]), by="label"), "damage must be index .* with d = 4"),
])  # fmt: skip
def test_errors(call, message):
    patterns = torch.rand(6, 4)
    memory = AssociativeMemory(patterns, "adaptive", labels=[0, 1, 2, 0, 1, 2])
    refuses(message, call, memory, patterns)
    assert len(memory.patterns) == len(memory.labels) == 6


@pytest.mark.parametrize("kind", [np.uint64, list, torch.uint64])
def test_labels_beyond_int64_are_refused_with_their_value(kind):
    labels = np.array([1, 2**63 + 5, 3], dtype=np.uint64)
    given = labels.tolist() if kind is list else labels if kind is np.uint64 else torch.from_numpy(labels)
    refuses(f"labels must be in the range of int64, .* got {2**63 + 5}", AssociativeMemory, torch.eye(3), labels=given)
    labels[1] = 2**63 - 1
    assert AssociativeMemory(torch.eye(3), labels=torch.from_numpy(labels)).classes[-1] == 2**63 - 1
