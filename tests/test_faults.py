"""Nothing is silent: what is invalid raises AHopError and changes nothing, and results are right at any scale."""

import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ahop_layers as ah
from ahop_layers import AssociativeMemory
from ahop_layers.memory import storage, variants
from tests.samples import refuses, unchanged

safetensors = pytest.importorskip("safetensors.torch")

# Scales.

SCALES = {
    torch.float16: (255.0, 1e-4),
    torch.bfloat16: (1e9,),
    torch.float32: (1e-9, 1e15),
    torch.float64: (1e-30, 1e100),
}
MEMORIES = {
    **{name: partial(AssociativeMemory, similarity=name) for name in ("auto", "dot", "dis", "l1", "adaptive")},
    "images": lambda rows: AssociativeMemory(rows.reshape(-1, 6, 6)),
    "blocks": lambda rows: adaptive(rows, init="uniform", bases=("dot",), blocks=ah.Blocks(4, normalize=True)),
    "debiased": lambda rows: adaptive(rows, debias=True, blocks=torch.arange(36) % 5),
}


def adaptive(rows, **options):
    return AssociativeMemory(rows, ah.AdaptiveSimilarity(rows.shape[1], **options).to(rows))


def scaled(dtype, scale):
    rows = nn.functional.normalize(torch.rand(40, 36) - 0.5)
    return ((scale * each.double()).to(dtype) for each in (rows, rows + 0.01 * torch.randn(40, 36)))


@pytest.mark.parametrize(("dtype", "scale"), [(dtype, scale) for dtype in SCALES for scale in SCALES[dtype]], ids=str)
@pytest.mark.parametrize("name", MEMORIES)
def test_a_memory_finds_the_same_at_any_scale(name, dtype, scale):
    patterns, query = scaled(dtype, scale)
    memory = MEMORIES[name](patterns)
    hits, found = memory.search(query, 2), memory.retrieve(query)
    assert torch.equal(hits.indices[:, 0], torch.arange(40))
    assert (hits.scores[:, 0] > hits.scores[:, 1]).all()
    assert found.isfinite().all()
    assert found.dtype == dtype


@pytest.mark.parametrize("name", ["dot", "adaptive", "debiased"])
@pytest.mark.parametrize("scale", [1e15, 1e-15])
def test_queries_of_another_scale_find_the_same(name, scale):
    patterns, _ = scaled(torch.float32, 1.0)
    hits = MEMORIES[name](patterns).search(scale * patterns)
    assert torch.equal(hits.indices[:, 0], torch.arange(40))
    assert hits.scores.isfinite().all()


@pytest.mark.parametrize("dtype", SCALES)
def test_scores_of_ordinary_patterns_have_their_dtype(dtype):
    patterns, query = scaled(dtype, 1.0)
    assert AssociativeMemory(patterns, "dis").scores(query).dtype == dtype


def test_values_that_no_dtype_holds_are_refused():
    memory, large = AssociativeMemory(torch.ones(2, 3)), torch.full((2, 3), 1e120, dtype=torch.float64)
    wide = AssociativeMemory(large, "adaptive")
    calls = {
        "patterns must not be infinite": [
            lambda: memory.add(large),
            lambda: memory.load_state_dict(memory.state_dict() | {"patterns": large}),
        ],
        "patterns must be in torch.float32, and their squares in torch.float32, got": [wide.float],
        "patterns must be in torch.float64, and their squares in torch.float64, got": [
            lambda: AssociativeMemory(large * large)
        ],
    }
    for message, each in calls.items():
        for call in each:
            refuses(message, call)
    assert wide.patterns.dtype == wide.similarity.w.dtype == torch.float64
    assert len(memory) == 2


# State dicts.


def attentions():
    return nn.Sequential(*(nn.MultiheadAttention(8, 2) for _ in range(2)))


def adapted(**options):
    model = attentions()
    ah.adapt_(model, **options)
    return model


def rewrite(path, **changes):
    """Changes tensors of a file."""
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    safetensors.save_file(safetensors.load_file(path) | changes, path, metadata=metadata)


NONSENSE = {
    "beta": (torch.nan, 0.0, -1.0, torch.inf),
    "similarity.w": (torch.nan, torch.inf, 1, True),
    "similarity.bias": (torch.nan, -torch.inf),
    "similarity.widths": (0.0, -1.0, torch.nan),
    "similarity.units": (0.0, -1.0, torch.inf),
    "separation.alpha_logit": (torch.inf,),
    "calibration": (torch.nan, -1.0, 1),
    "foreign": (-0.1, 1.1, torch.nan),
    "fit_counts": (-1, 0.5),
    "labels": (-1, 2),
    "names": (storage.text_tensor(["a", "a"]), storage.text_tensor({"0": "a", "1": "b"}), storage.text_tensor([1, 2])),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in NONSENSE for value in NONSENSE[name]])
def test_a_memory_with_nonsense_is_not_loaded(name, value, tmp_path):
    rows, options = torch.randn(4, 5), {"bases": ("dis", "dot", ("near", 0.5)), "debias": True}
    memory = AssociativeMemory(rows, ah.AdaptiveSimilarity(5, **options), labels=["a", "b"] * 2)
    memory.separation = ah.separation.Separation("entmax")
    memory.similarity.units = torch.ones(5)
    state = memory.state_dict()
    wrong = value if isinstance(value, torch.Tensor) else torch.full(state[name].shape, value)
    with unchanged(memory):
        refuses(f"{name} must", memory.load_state_dict, state | {name: wrong})
    memory.save(tmp_path / "memory")
    rewrite(tmp_path / "memory", **{name: wrong})
    refuses(f"{name} must", AssociativeMemory.load, tmp_path / "memory")


@pytest.mark.parametrize("name", ["1.similarity.w", "1.separation.alpha_logit"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1, True])
def test_similarities_with_nonsense_are_not_loaded(name, value, tmp_path):
    model = adapted(separation="entmax")
    state = model.state_dict()
    ah.save_similarities(model, tmp_path / "a")
    changed = {"0.similarity.w": state["0.similarity.w"] + 1, name: torch.full(state[name].shape, value)}
    rewrite(tmp_path / "a", **changed)
    with unchanged(model):
        refuses(f"{name} must", ah.load_similarities, model, tmp_path / "a")


@pytest.mark.parametrize("make", [adapted, partial(adaptive, torch.ones(3, 8))])
def test_other_bases_are_refused(make):
    load, other = make(bases=("l1",), init="l1").load_state_dict, make(bases=("dis",), init="dis")
    refuses("the state dict must have the bases l1, got dis", load, other.state_dict())


# Files.

FILES = {  # all bytes, or the metadata, which has a text of JSON
    "empty": lambda saved: b"",
    "truncated": lambda saved: saved[:-40],
    "random": lambda saved: np.random.default_rng(0).bytes(1000),
    "oversized header": lambda saved: (2**62).to_bytes(8, "little") + saved[8:],
    "no metadata": None,
    "no JSON": "{",
    "a list": '[["version", 1]]',
    "numbers": '{"0.similarity": 5, "1.similarity": 6}',
    "nested": "[" * 100_000,
}


def invalidate(path, kind, key):
    """Makes a file invalid; ``key`` is the name of its metadata."""
    change = FILES[kind]
    if callable(change):
        path.write_bytes(change(path.read_bytes()))
    else:
        metadata = None if change is None else {key: change}
        safetensors.save_file(safetensors.load_file(path), path, metadata=metadata)


@pytest.mark.parametrize("kind", FILES)
def test_an_invalid_file_is_refused(kind, tmp_path):
    model, memory, path = adapted(), AssociativeMemory(torch.rand(5, 4)), tmp_path / "file"
    ah.save_similarities(model, path)
    invalidate(path, kind, "ahop_layers.similarities")
    with unchanged(model):
        refuses("must", ah.load_similarities, model, path)
    memory.save(path)
    invalidate(path, kind, "ahop_layers.memory")
    refuses("must", AssociativeMemory.load, path)


SAVES = {
    "similarities": lambda path: ah.save_similarities(adapted(), path),
    "memory": lambda path: AssociativeMemory(torch.rand(500, 40)).save(path),
}


@pytest.mark.parametrize("kind", ["full disk", "read-only folder", "missing folder", "folder"])
@pytest.mark.parametrize("name", SAVES)
def test_a_save_that_fails_leaves_the_old_file(name, kind, tmp_path):
    """The disk is full for files of more than 512 bytes. Root may write into any folder except one of the kernel."""
    resource = pytest.importorskip("resource")
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    path.write_text("old")
    given = {"missing folder": tmp_path / "none" / "file", "folder": path.parent}.get(kind, path)
    if kind == "read-only folder":
        path.parent.chmod(0o500)
        given = path if os.geteuid() else Path("/proc/self/model")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512 if kind == "full disk" else limits[0], limits[1]))
    try:
        refuses("^path must be", SAVES[name], given)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        path.parent.chmod(0o700)
    assert path.read_text() == "old"
    assert [*path.parent.iterdir()] == [path]


# Arguments.

ROWS = torch.rand(3, 4)
ARRAYS = {
    "object": np.array([[object()] * 4] * 3),
    "datetime": np.zeros((3, 4), "M8[D]"),
    "complex": np.zeros((3, 4), complex),
    "float8": torch.ones(3, 4).to(torch.float8_e4m3fn),
    "sparse": torch.ones(3, 4).to_sparse(),
    "quantized": torch.quantize_per_tensor(torch.ones(3, 4), 0.1, 0, torch.quint8),
    "nested": torch.nested.nested_tensor([torch.ones(4), torch.ones(3)]),
    "text": "abc",
    "none": [[None] * 4] * 3,
}
LABELS = {  # strings are labels
    **{kind: array[:, 0] for kind, array in ARRAYS.items() if isinstance(array, np.ndarray)},
    **{kind: ARRAYS[kind] for kind in ("nested", "text", "none")},
    "longdouble": np.zeros(3, np.longdouble),
    "sparse": torch.ones(3, dtype=torch.int64).to_sparse(),
    "mixed": [1, "a", None],
    "surrogate": ["a", "b", "\ud800"],
}


@pytest.mark.parametrize("kind", [*ARRAYS, "string"])
def test_patterns_and_queries_of_other_kinds_are_refused_by_name(kind):
    given, memory = ARRAYS.get(kind, np.array([["a"] * 4] * 3)), AssociativeMemory(ROWS, "adaptive")
    calls = {
        "patterns": [lambda: AssociativeMemory(given), lambda: memory.add(given)],
        "queries x": [lambda: memory.search(given), lambda: memory(given), lambda: memory.scores(given)],
        "query|data|damage": [lambda: memory.fit((torch.arange(3), given))],
    }
    for name, each in calls.items():
        for call in each:
            refuses(rf"^({name}) must", call)


@pytest.mark.parametrize("kind", LABELS)
def test_labels_and_ids_of_other_kinds_are_refused_by_name(kind):
    memory = AssociativeMemory(ROWS, labels=[1, 2, 3], ids=[1, 2, 3])
    for name, other in (("labels", "ids"), ("ids", "labels")):
        for make in (partial(AssociativeMemory, ROWS), partial(memory.add, ROWS, **{other: [4, 5, 6]})):
            refuses(f"{name} must", make, **{name: LABELS[kind]})
    assert len(memory) == 3


@pytest.mark.parametrize("kind", [">f8", ">i4", "longdouble", "f2", "u1", "?"])
def test_numbers_of_other_kinds_are_converted(kind):
    given = (4 * np.eye(4)).astype(kind)
    memory = AssociativeMemory(given, "dot", labels=np.arange(4).astype(">i8"), ids=np.arange(4).astype(">u4"))
    hits = memory.search(given)
    assert hits.ids.tolist() == hits.labels.tolist() == [[0], [1], [2], [3]]


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, True, np.bool_(True), 1.0, "1", None])
def test_a_seed_is_an_integer_of_64_bits(seed):
    for make in (partial(variants.Mixed, 0.5), AssociativeMemory(ROWS).fit):
        refuses("seed must be an integer of 64 bits", make, seed=seed)


@pytest.mark.parametrize("name", ["Noisy", "Missing", "Replaced", "Mixed"])
@pytest.mark.parametrize("make", [np.float32, np.float64, torch.tensor])
def test_variants_accept_scalars_of_numpy(name, make):
    damages = (getattr(variants, name)(level).bind(ROWS) for level in (0.5, make(0.5)))
    first, second = (damage(ROWS, torch.Generator().manual_seed(0)).nan_to_num(9.0) for damage in damages)
    assert torch.equal(first, second)


def test_tensors_of_inference_mode_are_refused_under_autograd():
    with torch.inference_mode():
        inference = ROWS.clone()
    rows = ROWS.clone().requires_grad_()
    for call in (
        lambda: AssociativeMemory(inference, "dot")(rows),
        lambda: AssociativeMemory(ROWS, "adaptive")(inference),
        lambda: ah.adaptive_similarity(rows, inference, torch.ones(2, 4)),
    ):
        with pytest.raises(RuntimeError, match="make a clone"):
            call()
        with torch.no_grad():
            assert call().isfinite().all()


def test_a_memory_without_labels_has_no_classes():
    assert hasattr(AssociativeMemory(ROWS), "classes")
    assert AssociativeMemory(ROWS).classes is None


def test_neighbors_name_the_extra_that_has_scikit_learn(monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("sklearn", "ahop_layers.neighbors"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(
        ImportError, match=r"needs scikit-learn, got no installation: pip install ahop-layers\[sklearn\]"
    ):
        import ahop_layers.neighbors  # noqa: F401
