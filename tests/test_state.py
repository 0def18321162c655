"""A memory is one state: it is read whole and replaced whole, and what was read earlier does not follow it."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch

import ahop_layers as ah
from ahop_layers.memory.state import State
from tests.samples import refuses, repeated_in_threads

KINDS = {
    "auto": "auto",
    "adaptive": "adaptive",
    "l1": "l1",
    "blocks": lambda: ah.AdaptiveSimilarity(12, blocks=torch.arange(12) % 3),
}


def make(kind="auto", count=60, seed=0, **options):
    similarity = KINDS[kind] if isinstance(KINDS[kind], str) else KINDS[kind]()
    rows = torch.rand(count, 12, generator=torch.Generator().manual_seed(seed))
    return ah.AssociativeMemory(rows, similarity, **options)


def answers(memory, query):
    hits = memory.search(query, 2)
    return torch.cat([hits.scores, hits.confidence, hits.indices.float()], 1)


@pytest.mark.parametrize("kind", KINDS)
def test_hits_keep_the_state_of_their_search(kind, small_fit):
    memory = make(kind, labels=[0, 1] * 30)
    memory.fit(progress=False)
    buffer = memory.patterns[:3] + 0.01
    expected = memory.search(buffer, 2).confidence
    hits = memory.search(buffer, 2)
    buffer.uniform_()
    memory.fit(ah.variants.Noisy(0.5), "pattern", progress=False)
    memory.remove(range(50))
    memory.load_state_dict(make(kind, 5, labels=[3] * 5).state_dict())
    for parameter in memory.parameters():
        torch.nn.init.normal_(parameter)
    assert torch.equal(hits.confidence, expected)


def test_hits_are_shown_and_pickled_without_a_search_beyond_the_confidence(small_fit, monkeypatch):
    memory = make()
    memory.fit(progress=False)
    hits, before = memory.search(memory.patterns[:2]), memory.search(memory.patterns[:2])
    confidence = before.confidence
    monkeypatch.setattr(State, "logsumexp", None)
    assert "confidence" not in repr(hits)
    assert "confidence=tensor" in repr(before)
    assert torch.equal(pickle.loads(pickle.dumps(before)).confidence, confidence)


@pytest.mark.parametrize("kind", ["auto", "adaptive", "blocks"])
def test_fits_and_state_dicts_keep_the_parameters(kind, small_fit):
    memory = make(kind)
    parameters = [*memory.similarity.parameters()]
    memory.fit(progress=False)
    memory.load_state_dict(make(kind, 9).state_dict())
    assert all(new is old for new, old in zip(memory.similarity.parameters(), parameters, strict=True))


@pytest.mark.parametrize("kind", ["auto", "adaptive", "blocks"])
def test_searches_follow_an_optimizer_and_a_state_dict_of_the_similarity(kind):
    memory, query = make(kind), torch.rand(5, 12)
    memory.search(query)
    optimizer = torch.optim.SGD(memory.similarity.parameters(), 1.0)
    memory.scores(query).sum().backward()
    optimizer.step()
    torch.testing.assert_close(memory.search(query).scores[:, 0], memory.scores(query).amax(1).detach())
    state = copy.deepcopy(memory.similarity.state_dict())
    state["w"] = torch.randn_like(state["w"])
    memory.similarity.load_state_dict(state)
    torch.testing.assert_close(memory.search(query).scores[:, 0], memory.scores(query).amax(1).detach())
    memory.similarity = ah.AdaptiveSimilarity(12, init="dis")
    torch.testing.assert_close(memory.search(query).scores[:, 0], -torch.cdist(query, memory.patterns).amin(1).square())


def test_one_prepared_copy_of_the_patterns_is_kept():
    memory, copies = make("blocks"), []
    for _ in range(5):
        memory.similarity.load_state_dict(memory.similarity.state_dict())
        memory.search(torch.rand(1, 12))
        copies.append(weakref.ref(memory._state.prepared[0]))
    gc.collect()
    assert [each() is not None for each in copies] == [False] * 4 + [True]


def test_a_refused_state_dict_keeps_what_another_thread_stored():
    memory, added = make(), torch.rand(1, 12)
    broken = memory.state_dict() | {"similarity.w": torch.full((8, 12), torch.nan)}

    def refuse(_):
        refuses("must be finite", memory.load_state_dict, broken)

    with repeated_in_threads(refuse, 2):
        for _ in range(40):
            memory.add(added)
    assert len(memory) == 100


def test_converting_a_memory_keeps_what_another_thread_stored():
    memory = make()
    with repeated_in_threads(lambda number: memory.double() if number % 2 else memory.float(), 1):
        for _ in range(60):
            memory.add(torch.rand(1, 12))
    assert len(memory) == 120


def test_searches_see_one_state_while_others_are_fitted_loaded_and_set(small_fit):
    states, query = [make(seed=seed) for seed in (0, 1)], torch.rand(4, 12)
    for state, noise in zip(states, (0.001, 0.3), strict=True):
        state.fit(ah.variants.Noisy(noise), progress=False)
    memory, expected = copy.deepcopy(states[0]), [answers(each, query) for each in states]

    def search(_):
        found = answers(memory, query)
        assert any(torch.allclose(found, each, atol=1e-5) for each in expected)

    with repeated_in_threads(search, 2):
        for number in range(60):
            memory.load_state_dict(states[number % 2].state_dict())


def test_compiled_searches_see_missing_values():
    memory = make(labels=range(60))
    query = memory.patterns.clone()
    query[torch.arange(60), torch.arange(60) % 12] = torch.nan
    for method in (memory.recall, memory.classify):
        assert torch.equal(torch.compile(method, backend="eager")(query), torch.arange(60))
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(memory, backend="eager")(query), memory(query))


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_compiled_searches_refuse_what_eager_ones_refuse(value, small_fit):
    memory = make("l1")
    memory.fit(progress=False)
    query = memory.patterns[:2].clone()
    query[1] = value
    for method in (memory.recall, ah.Repair(memory)):
        with pytest.raises(RuntimeError, match="queries x must"):
            torch.compile(method, backend="aot_eager")(query)
    refuses("repair needs a fit", torch.compile(ah.Repair(make()), backend="aot_eager"), query[:1])


class Dropped(ah.AdaptiveSimilarity):
    """A similarity with a mode, an attribute, and a lock that cannot be copied."""

    def __init__(self, dim):
        super().__init__(dim)
        self.dropout, self.factor, self.lock = torch.nn.Dropout(0.5), 1.0, threading.Lock()

    def forward(self, query, key, **options):
        return self.factor * super().forward(self.dropout(query), key, **options)


def test_a_similarity_of_the_user_is_read_as_it_is():
    memory, query = ah.AssociativeMemory(torch.rand(30, 12), Dropped(12)).eval(), torch.rand(4, 12)
    assert torch.equal(memory.search(query).scores, memory.search(query).scores)
    memory.similarity.factor = 2.0
    torch.testing.assert_close(memory.search(query).scores[:, 0], memory.scores(query).amax(1))


def test_searches_follow_other_dtypes_hooks_and_parameters_of_a_call():
    memory, query, calls = make("adaptive"), torch.rand(4, 12), []
    torch.nn.init.normal_(memory.similarity.w)
    for dtype in (torch.float16, torch.float32, torch.float64):
        memory.to(dtype)
        assert torch.equal(memory.search(query.to(dtype)).scores[:, 0], memory.scores(query.to(dtype)).amax(1))
    hook = memory.similarity.register_forward_hook(lambda *arguments: calls.append(1))
    memory.search(query)
    hook.remove()
    assert calls
    other = {name: 2 * value for name, value in memory.named_parameters()}
    with torch.no_grad():
        expected = torch.func.functional_call(memory, other, (query,))
    torch.testing.assert_close(torch.func.functional_call(memory, other, (query,)), expected)
    assert torch.equal(memory.search(query).scores[:, 0], memory.scores(query).amax(1))


def test_a_fit_keeps_frozen_weights_and_beta_can_be_set():
    memory = make("adaptive")
    memory.similarity.requires_grad_(False)
    memory.similarity.w.data.mul_(3)
    kept = memory.similarity.w.clone()
    memory.fit((torch.arange(20), memory.patterns[:20] + 0.01), progress=False)
    assert torch.equal(memory.similarity.w, kept)
    memory.beta = 3
    assert memory.beta == memory.state_dict()["beta"] == 3
    with pytest.raises(ah.AHopError, match="beta must be a positive number, got -1"):
        memory.beta = -1


def test_a_refused_state_dict_of_a_model_leaves_nothing_behind():
    model, other = (torch.nn.Sequential(make(kind, 3000)) for kind in ("auto", "adaptive"))
    before = len(pickle.dumps(model))
    with pytest.raises(Exception, match="bases"):
        model.load_state_dict(other.state_dict())
    assert len(pickle.dumps(model)) == before
