"""A memory in use: inputs as people have them, ids, confidence, reasons, files, and threads."""

import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import ahop_layers as ah
from ahop_layers import AssociativeMemory
from ahop_layers.memory import state as state_module
from tests.samples import refuses, repeated_in_threads

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed: pip install '.[save]'")


def damaged(patterns, count=3):
    """The patterns with the first values replaced by others far away."""
    query = patterns.clone()
    query[:, :count] = 7.0
    return query


@pytest.fixture
def rows():
    return torch.rand(60, 12)


@pytest.mark.parametrize("kind", ["tensor", "array", "list", "frame", "images", "colors", "uint8", "integers"])
def test_patterns_and_queries_as_people_have_them(kind):
    values = torch.randint(0, 256, (30, 12))
    given = {
        "tensor": lambda x: x / 255,
        "array": lambda x: (x / 255).numpy(),
        "list": lambda x: (x / 255).tolist(),
        "frame": lambda x: pytest.importorskip("pandas").DataFrame(x.numpy(), columns=list("abcdefghijkl")),
        "images": lambda x: x.reshape(-1, 3, 4) / 255,
        "colors": lambda x: x.reshape(-1, 3, 2, 2) / 255,
        "uint8": lambda x: x.to(torch.uint8).reshape(-1, 4, 3),
        "integers": lambda x: x,
    }[kind]
    memory = AssociativeMemory(given(values))
    assert memory.patterns.dtype == (torch.uint8 if kind == "uint8" else torch.float32)
    found = memory.search(given(values[:5]), k=2)
    assert np.asarray(found.indices)[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert isinstance(found.indices, np.ndarray) == (kind in ("array", "frame"))
    one = memory.search(given(values[:5])[3] if kind != "frame" else values[3])
    assert int(one.indices[0]) == 3
    if kind in ("images", "colors", "uint8"):
        assert memory.retrieve(given(values[:5])).shape == memory.patterns[:5].shape
        assert int(memory.recall(values[4].float() / (1 if kind == "uint8" else 255))) == 4


def test_bytes_stay_bytes_and_are_scored_as_numbers(small_fit):
    values = torch.randint(0, 256, (64, 10), dtype=torch.uint8)
    memory, plain = AssociativeMemory(values), AssociativeMemory(values.float())
    query = damaged(values[:8].float())
    torch.testing.assert_close(memory.scores(query), plain.scores(query))
    for each in (memory, plain):
        each.fit(ah.variants.Replaced((0.0, 0.5)))
    assert memory.patterns.dtype == memory.double().patterns.dtype == torch.uint8
    found, expected = (each.search(query) for each in (memory, plain))
    assert torch.equal(found.indices, expected.indices)
    memory.add(values[:1].float())
    refuses("integers from 0 to 255", memory.add, torch.full((1, 10), 0.5))


def test_labels_and_ids_may_be_strings(rows):
    labels = ["cat", "dog", "cow"] * 20
    memory = AssociativeMemory(rows, labels=np.array(labels), ids=range(100, 160))
    assert memory.classes == ["cat", "cow", "dog"]
    assert memory.labels == labels
    assert memory.classify(rows[:4]) == labels[:4]
    hits = memory.search(rows[:2].numpy(), k=2)
    assert hits.labels[:, 0].tolist() == labels[:2]
    assert hits.ids[:, 0].tolist() == [100, 101]
    memory.add(rows[:2] + 2, labels=["ant", "dog"], ids=[1, 2])
    assert memory.classes == ["ant", "cat", "cow", "dog"]
    assert memory.classify(rows[0] + 2) == "ant"
    memory.add(rows[:2] + 4, labels=["ant", "cat"], ids=[100, 3], replace=True)
    assert len(memory) == 63
    assert memory.search(rows[0] + 4).ids == [100]
    assert memory.search(rows[0] + 4).labels == ["ant"]
    memory.remove(ids=[100])
    assert len(memory) == 62


@pytest.mark.parametrize(("call", "message"), [
    (lambda m, x: m.add(x, ids=["a"] * 2), "ids must differ, got 'a' more than once"),
    (lambda m, x: m.add(x, ids=["0", "new"]), "ids must not be stored already, got '0': replace=True"),
    (lambda m, x: m.add(x), "ids must be given: the memory has ids, got none"),
    (lambda m, x: m.add(x, ids=["only"]), "ids must be one for each of 2 patterns, got 1"),
    (lambda m, x: m.add(x, ids=[0.5, 1.5]), "ids must be strings or integers.* got float"),
    (lambda m, x: m.remove(ids=["none"]), "ids must be ids of stored patterns, got 'none'"),
    (lambda m, x: m.remove(), "an index or ids, got neither"),
    (lambda m, x: m.search(x[:, :3]), r"queries x must be \(..., d\) or \(..., 3, 4\) with the d = 12"),
    (lambda m, x: m.explain(x, index=60), "index must be integers from 0 to 59"),
    (lambda m, x: m.threshold(2.0), "false_accepts must be"),
    (lambda m, x: m.threshold(), r"threshold needs a fit .* got none: call memory.fit\(\)"),
])  # fmt: skip
def test_errors_name_what_was_expected(call, message, rows):
    memory = AssociativeMemory(rows.reshape(-1, 3, 4), ids=[str(i) for i in range(60)])
    refuses(message, call, memory, rows[:2])
    assert len(memory) == 60


@pytest.mark.parametrize("labeled", [False, True])
def test_the_confidence_is_the_share_of_a_hit(labeled, rows, monkeypatch, small_fit):
    monkeypatch.setattr(state_module, "CHUNK_ELEMENTS", 12 * 7)
    monkeypatch.setattr(state_module, "QUERIES_AT_ONCE", 4)
    labels, rows = torch.arange(60) % 4 if labeled else None, rows.double()
    memory = AssociativeMemory(rows, labels=labels)
    query = damaged(rows[:6])
    assert memory.search(query).confidence is None
    memory.fit()
    hits = memory.search(query, k=3)
    factor, by_sum, by_odds, constant = memory.state_dict()["calibration"].tolist()
    scores = memory.scores(query).double()
    share = (factor * scores).exp()
    total = share.sum(1, keepdim=True)
    if labeled:
        share = torch.stack([share[:, labels == each].sum(1) for each in range(4)], 1)[:, labels]
    share = (share / total).gather(1, hits.indices)
    known = by_sum * total.log() + by_odds * share[:, :1].logit().clamp(-30, 30) + constant
    torch.testing.assert_close(hits.confidence, share * known.sigmoid(), atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("labeled", [False, True])
def test_unknown_queries_are_rejected_at_the_rate_that_was_asked_for(labeled, small_fit):
    centers = torch.rand(60, 40)
    rows = (centers[:40].repeat(4, 1) + 0.02 * torch.randn(160, 40)) if labeled else centers[:40]
    memory = AssociativeMemory(rows, labels=torch.arange(40).repeat(4) if labeled else None)
    damage = ah.variants.Replaced((0.0, 0.7), low=0.0, high=1.0)
    memory.fit(damage)
    known, foreign = (damage(each.repeat(20, 1)) for each in (centers[:40], centers[40:]))
    sure, unsure = (memory.search(each).confidence[:, 0] for each in (known, foreign))
    assert sure.median() > 0.9
    assert unsure.median() < 0.1
    threshold = memory.threshold(false_accepts=0.05)
    assert (unsure > threshold).float().mean() < 0.15
    assert (sure > threshold).float().mean() > 0.7
    assert memory.threshold(0.01) >= threshold


NETWORKS = {
    "auto": {},
    "dot": {"similarity": "dot"},
    "l1": {"similarity": "l1"},
    "adaptive": {"similarity": "adaptive"},
    "blocks": {"bases": ("l1", ("near", 0.2)), "blocks": ah.Blocks(4, normalize=True), "init": "uniform"},
    "patches": {"blocks": ah.patches(3, 4, 2), "debias": True},
}


def network(name, rows):
    """A memory with weights that are not those of the start."""
    keywords = dict(NETWORKS[name])
    if {"blocks", "bases"} & {*keywords}:
        memory = AssociativeMemory(rows, ah.AdaptiveSimilarity(rows.shape[1], **keywords))
    else:
        memory = AssociativeMemory(rows, **keywords)
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    if hasattr(memory.similarity, "refresh"):
        memory.similarity.refresh()
    return memory


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_contributions_add_up_to_the_score(name, missing, rows):
    memory = network(name, rows)
    query = damaged(rows[:7]) + 0.01 * torch.randn(7, 12)
    if missing:
        query[:, 5:8] = torch.nan
    scores, indices = memory.search(query)
    explained = memory.explain(query)
    torch.testing.assert_close(explained.sum(-1), scores[:, 0], atol=1e-4, rtol=1e-4)
    assert torch.equal(memory.explain(query, index=indices[:, 0]), explained)
    other = memory.explain(query, index=torch.arange(7) + 9).sum(-1)
    torch.testing.assert_close(other, memory.scores(query)[range(7), range(9, 16)], atol=1e-4, rtol=1e-4)
    if missing:
        assert not explained[:, 5:8].any()


def test_replaced_values_contribute_least(rows, monkeypatch):
    monkeypatch.setattr(state_module, "QUERIES_AT_ONCE", 7)
    memory = AssociativeMemory(rows)
    lowest = memory.explain(damaged(rows)).argsort(-1)[:, :3].sort(-1).values
    assert (lowest == torch.arange(3)).all()


SAVED = {
    **{name: lambda rows, name=name: network(name, rows) for name in NETWORKS},
    "named": lambda rows: AssociativeMemory(rows, labels=["a", "b"] * 30, ids=[f"id {i}" for i in range(60)], beta=3.0),
    "bytes": lambda rows: AssociativeMemory((255 * rows).byte().reshape(-1, 3, 4)),
    "double": lambda rows: AssociativeMemory(rows.double()),
    "missing": lambda rows: AssociativeMemory(rows.masked_fill(rows < 0.2, torch.nan)),
    "entmax": lambda rows: AssociativeMemory(rows, "dot", separation="entmax"),
}


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_memory_is_the_same_memory(name, rows, tmp_path):
    memory = SAVED[name](rows)
    memory.save(tmp_path / "memory.safetensors")
    loaded = AssociativeMemory.load(tmp_path / "memory.safetensors")
    query = damaged(rows[:5])
    assert torch.equal(loaded.scores(query), memory.scores(query))
    assert torch.equal(loaded.retrieve(query), memory.retrieve(query))
    assert (loaded.labels, loaded.ids, len(loaded)) == (memory.labels, memory.ids, len(memory))
    assert loaded.patterns.shape == memory.patterns.shape
    assert loaded._fits_beta == memory._fits_beta
    assert [*tmp_path.iterdir()] == [tmp_path / "memory.safetensors"]


@pytest.mark.parametrize("init", ["dot", "uniform", torch.linspace(0, 1, 24).reshape(2, 12)])
def test_a_saved_similarity_keeps_its_init(init, rows, tmp_path):
    memory = AssociativeMemory(rows, ah.AdaptiveSimilarity(12, init=init, debias=True))
    memory.save(tmp_path / "memory.safetensors")
    loaded = AssociativeMemory.load(tmp_path / "memory.safetensors")
    for each in (memory, loaded):
        each.similarity.reset_parameters()
    assert torch.equal(loaded.similarity.footprint_weight(), memory.similarity.footprint_weight())


def test_tensors_without_values_are_refused_and_states_and_indices_of_other_kinds(rows):
    memory, given, number = AssociativeMemory(rows), rows.to("meta"), torch.arange(60, device="meta")
    for call in (
        lambda: memory.search(given),
        lambda: memory.add(given),
        lambda: AssociativeMemory(rows, labels=number),
        lambda: AssociativeMemory(rows, ids=number),
        lambda: AssociativeMemory(rows, "adaptive").fit((torch.arange(60), given)),
        lambda: AssociativeMemory(given),
    ):
        refuses("must be|must have|needs", call)
    for patterns in (given, rows.to_sparse(), rows.to(torch.float8_e4m3fn)):
        refuses("must be|must have", memory.load_state_dict, memory.state_dict() | {"patterns": patterns})
    for index in (number, torch.arange(60).to_sparse(), torch.arange(60).to(torch.complex64)):
        refuses("must be|must have", memory.explain, rows, index=index)
    assert len(memory) == 60


@pytest.mark.slow
def test_another_process_computes_the_same_bits(rows, tmp_path, small_fit):
    memory = AssociativeMemory(rows, labels=["a", "b"] * 30)
    memory.fit(ah.variants.Replaced((0.0, 0.5)))
    memory.save(tmp_path / "memory.safetensors")
    AssociativeMemory(torch.rand(9, 6, 6)).save(tmp_path / "images.safetensors")
    query = damaged(rows[:5])
    torch.save(query, tmp_path / "query.pt")
    code = (
        "import sys, torch, ahop_layers as ah; torch.set_num_threads(1);"
        "memory = ah.AssociativeMemory.load('memory.safetensors');"
        "hits = memory.search(torch.load('query.pt', weights_only=True), k=2);"
        "torch.save([hits.scores, hits.indices, hits.confidence, torch.tensor(memory.threshold())], 'hits.pt');"
        "ah.AssociativeMemory.load('images.safetensors');"
        "assert 'torch._dynamo' not in sys.modules"  # the compiler: its import would take seconds
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    hits = memory.search(query, k=2)
    expected = [hits.scores, hits.indices, hits.confidence, torch.tensor(memory.threshold())]
    assert all(map(torch.equal, torch.load(tmp_path / "hits.pt", weights_only=True), expected))


def test_modules_of_others_are_not_saved(rows, tmp_path):
    class Mine(torch.nn.Module):
        def forward(self, query, key):
            return query @ key.mT

    memory = AssociativeMemory(rows, Mine())
    message = "save needs a similarity of this package, got Mine: save the state_dict"
    refuses(message, memory.save, tmp_path / "memory.safetensors")
    assert not [*tmp_path.iterdir()]


METADATA = {
    "newer": {"version": 99},
    "hostile": {"similarity": {"blocks": 3, "debias": "__import__('os')"}, "separation": 5},
    "short": {},
}


@pytest.mark.parametrize("kind", METADATA)
def test_a_file_whose_metadata_do_not_fit_its_tensors_is_refused(kind, rows, tmp_path):
    path = tmp_path / "memory.safetensors"
    refuses("path must be", AssociativeMemory.load, path)
    AssociativeMemory(rows, ids=[str(i) for i in range(60)]).save(path)
    tensors = safetensors.load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["ahop_layers.memory"])
    if kind == "short":
        tensors["ids"] = tensors["ids"][:-9].clone()
    safetensors.save_file(tensors, path, metadata={"ahop_layers.memory": json.dumps(header | METADATA[kind])})
    refuses("must", AssociativeMemory.load, path)


@pytest.mark.slow
def test_a_killed_save_leaves_the_old_file(rows, tmp_path):
    path = tmp_path / "memory.safetensors"
    AssociativeMemory(rows).save(path)
    before = path.read_bytes()
    code = (
        "import torch, ahop_layers as ah; memory = ah.AssociativeMemory(torch.rand(300_000, 100), check=False);"
        "print('ready', flush=True); memory.save('memory.safetensors')"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE)
    process.stdout.readline()
    while not [each for each in tmp_path.iterdir() if each != path]:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert path.read_bytes() == before
    assert len(AssociativeMemory.load(path)) == 60
    AssociativeMemory(rows[:5]).save(path)
    assert [*tmp_path.iterdir()] == [path]  # without what the killed save left


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_memories_and_hits_are_copied(copied, rows, small_fit):
    memory = AssociativeMemory(rows, labels=range(60), ids=[str(i) for i in range(60)])
    memory.fit()
    other = copied(memory)
    other.add(rows[:1] + 3, labels=[7], ids=["new"])
    assert (len(memory), len(other)) == (60, 61)
    hits = memory.search(rows[:2])
    again = copied(hits)
    assert again.ids == hits.ids
    assert all(map(torch.equal, (*again, again.labels, again.confidence), (*hits, hits.labels, hits.confidence)))
    assert str(again) == str(hits)
    assert "ids=[['0'], ['1']], confidence=tensor(" in str(hits)


def test_a_pickled_hit_does_not_carry_the_memory():
    memory = AssociativeMemory(torch.rand(10_000, 16))
    assert len(pickle.dumps(memory.search(memory.patterns[:3]))) < 2000


@pytest.mark.slow
def test_threads_that_search_see_one_state_while_another_changes_it():
    """A pattern has its number as every value, as its id and as its label: a mixed state would not match."""
    number = torch.arange(50).float()
    memory = AssociativeMemory(number[:, None].expand(50, 8).clone(), "l1", labels=range(50), ids=range(50))
    searches = []

    def search(_):
        asked = torch.randint(0, 20, (4,))
        hits = memory.search(asked[:, None].expand(4, 8).float() + 0.1, k=1)
        assert hits.ids == hits.labels.tolist() == asked[:, None].tolist()
        assert torch.equal(memory.classify(asked[:, None].expand(4, 8).float()), asked)
        searches.append(1)

    with repeated_in_threads(search, 4):
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            fresh = torch.randint(1000, 2000, ()).item()
            memory.add(torch.full((1, 8), float(fresh)), labels=[fresh], ids=[fresh])
            memory.remove(ids=[20 + fresh % 30])
            memory.add(torch.full((1, 8), 20.0 + fresh % 30), labels=[20 + fresh % 30], ids=[20 + fresh % 30])
            memory.remove(ids=[fresh])
    assert len(searches) > 10
    assert len(memory) == 50


def test_few_patterns_or_classes_and_queries_that_share_no_value_do_not_spoil_the_confidence(small_fit):
    for count in (1, 2):
        few = AssociativeMemory(torch.rand(count, 5))
        few.fit()
        confidence = few.search(few.patterns).confidence
        assert confidence is None if count == 1 else ((confidence >= 0) & (confidence <= 1)).all()
    one = AssociativeMemory(torch.rand(50, 8), labels=[1] * 50)
    one.fit()
    refuses("threshold needs a fit of patterns of at least two classes", one.threshold)
    centers = torch.randn(2, 32)
    labels = torch.arange(60) % 2
    two = AssociativeMemory(centers[labels] + 0.3 * torch.randn(60, 32), labels=labels)
    two.fit()
    assert two.threshold() > 0
    assert two.state_dict()["calibration"][2] == 0  # the odds of one class say nothing about another
    gaps = torch.rand(200, 10)
    gaps[torch.rand(200, 10) < 0.6] = torch.nan
    gaps[:, 0] = gaps[:, 0].nan_to_num(0.5)
    memory = AssociativeMemory(gaps.double())
    memory.fit()
    assert memory.state_dict()["calibration"].isfinite().all()
    assert memory.search(gaps[:5]).confidence.isfinite().all()
    assert memory.state_dict()["calibration"][1:3].abs().max() > 1e-3


def test_reading_changes_nothing_and_a_calibration_is_that_of_the_last_fit(rows, small_fit):
    memory = AssociativeMemory(rows)
    before = {name: value.clone() for name, value in memory.state_dict().items()}
    hits = memory.search(rows[:3], k=2)
    assert hits.confidence is hits.ids is hits.labels is None
    assert "confidence" not in str(hits)
    assert all(torch.equal(value, before[name]) for name, value in memory.state_dict().items())
    memory.fit(ah.variants.Noisy(0.1))
    fitted = memory.state_dict()["calibration"].clone()
    memory.add(torch.rand(500, 12))
    assert 0 < memory.threshold() < 1
    assert (memory.search(9 * rows).confidence < memory.threshold()).all()
    assert torch.equal(memory.state_dict()["calibration"], fitted)
    assert memory.half().state_dict()["foreign"].dtype == torch.float32


def test_states_are_not_mixed(rows, tmp_path):
    memory = AssociativeMemory(rows, labels=range(60))

    def read(_):
        state = memory.state_dict()
        assert len(state["labels"]) == len(state["patterns"])

    with repeated_in_threads(read, 1):
        for _ in range(200):
            memory.add(rows[:1], labels=[7])
    photos = AssociativeMemory((255 * rows).byte(), "dot")
    state = AssociativeMemory(rows, "dot").state_dict()
    refuses("patterns must be integers from 0 to 255", photos.load_state_dict, state)
    for value in (torch.inf, -torch.inf):
        refuses("queries x must not be infinite", memory.search, rows[:2] * value)
    refuses("path must be a string or a path, got NoneType", memory.save, None)
    assert memory.explain(rows[:0]).shape == (0, 12)
    for index in ("a", [0, 1], 1.5, True, 999, -1):
        refuses("index must be integers from 0 to", memory.explain, rows[:3], index=index)
    refuses("ids must be a sequence, got set", AssociativeMemory, rows[:2], ids={"a", "b"})
    refuses("replace=True needs a memory with ids", AssociativeMemory(rows).add, rows, replace=True)
