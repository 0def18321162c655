"""A bias of queries that a fit of the default memory learns, and all that has to know of it."""

import copy
import functools

import pytest
import torch

import ahop_layers as ah
from ahop_layers.memory.learn.auto import REACH, Frame

pytestmark = pytest.mark.slow
DIM = 24


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


PATTERNS = torch.rand(400, DIM, generator=seeded()) * 2 - 1
SHIFT = 0.8 * (2.0 * torch.randint(2, (DIM,), generator=seeded(1)) - 1)


def biased(origin, seed=2, share=0.3):
    """Replaces values, adds noise, and then a bias."""
    wrong = torch.rand(origin.shape, generator=seeded(seed)) < share
    values = torch.rand(origin.shape, generator=seeded(seed + 1)) * 2 - 1
    noise = 0.1 * torch.randn(origin.shape, generator=seeded(seed + 2))
    return torch.where(wrong, values, origin + noise) + SHIFT


@functools.cache
def _fit():
    index = torch.randint(400, (1500,), generator=seeded(3))
    memory = ah.AssociativeMemory(PATTERNS)
    return memory, memory.fit((index, biased(PATTERNS[index])))


@pytest.fixture
def memory():
    """A memory that was fitted to pairs with a bias, a copy for each test."""
    return copy.deepcopy(_fit()[0])


def accuracy(memory, query, index):
    return (memory.recall(query) == index).double().mean().item()


def test_a_fit_by_pairs_finds_the_bias_and_says_so(memory):
    assert (memory.similarity.bias - SHIFT).abs().max() < 0.1
    assert repr(memory.similarity).endswith(", bias)")
    assert _fit()[1].result == repr(memory.similarity)
    index = torch.arange(400)
    found = accuracy(memory, biased(PATTERNS, 9), index)
    assert found > accuracy(ah.AssociativeMemory(PATTERNS), biased(PATTERNS, 9), index) + 0.2
    assert found > 0.9
    assert dict(_fit()[1].rows)["intact records"] == 1.0


@pytest.mark.parametrize(("damage", "has_bias"), [
    (ah.variants.Mixed(0.3, 0.01, 0.8), True),
    (biased, True),
    (ah.variants.Replaced(0.5), False),
    ([ah.variants.Noisy(0.1), ah.variants.Missing(0.3)], False),
])  # fmt: skip
def test_a_bias_is_looked_for_where_the_damage_may_have_one(damage, has_bias, small_fit):
    assert ah.variants.as_damage(damage).shifts == has_bias
    memory = ah.AssociativeMemory(PATTERNS)
    memory.fit(damage)
    assert (memory.similarity.bias is not None) == has_bias


def test_pairs_without_a_bias_give_none(small_fit):
    index = torch.randint(400, (1500,), generator=seeded(3))
    for patterns in (PATTERNS, 5 + 3 * PATTERNS):  # wrong values are far from the mean of 0
        memory = ah.AssociativeMemory(patterns)
        memory.fit((index, ah.variants.Replaced(0.5).bind(patterns)(patterns[index], seeded(4))))
        assert memory.similarity.bias is None


def test_the_limits_of_queries_are_shifted_by_the_bias(memory):
    similarity, far = memory.similarity, PATTERNS[:9] + SHIFT
    similarity.set_(["l1"], [1.0], torch.ones(1, DIM), Frame(bias=SHIFT))
    torch.testing.assert_close(memory.search(far).scores.flatten(), torch.zeros(9), atol=1e-5, rtol=0)
    low, high = PATTERNS.aminmax(dim=0)
    limit = (high + REACH * (high - low))[0] + SHIFT[0]
    far[:, 0] = limit
    scores = memory.search(far).scores
    far[:, 0] = limit + 100.0
    torch.testing.assert_close(memory.search(far).scores, scores)


def test_noise_far_beyond_the_patterns_is_not_cut_off():
    index = torch.randint(400, (1500,), generator=seeded(3))

    def noisy(seed):
        return PATTERNS[index] + 0.6 * torch.randn(1500, DIM, generator=seeded(seed))

    memory = ah.AssociativeMemory(PATTERNS)
    memory.fit((index, noisy(5)))
    assert memory.similarity.reach > REACH
    nearest = torch.cdist(noisy(6), PATTERNS).argmin(1)
    assert accuracy(memory, noisy(6), index) > (nearest == index).double().mean() - 0.02


def test_codes_follow_the_bias(memory):
    pytest.importorskip("faiss", reason="codes are scanned by FAISS")
    query, index = biased(PATTERNS, 9, 0.1), torch.arange(400)
    exact = accuracy(memory, query, index)
    assert (memory.recall(query, shortlist=60) == index).double().mean() > exact - 0.02


def test_retrieval_repair_and_reasons_take_the_bias_off(memory):
    query = biased(PATTERNS[:50], 9, 0.0)
    assert (memory.retrieve(query, steps=2) - PATTERNS[:50]).abs().mean() < 0.05
    values, intact = memory.repair(query)
    kept = values == query - memory.similarity.bias
    assert kept.double().mean() > 0.9  # values that are intact lose their bias
    assert intact.mean() > 0.5
    reasons = memory.explain(query, torch.arange(50))
    torch.testing.assert_close(reasons.sum(-1), memory.scores(query)[:, :50].diagonal(), rtol=1e-4, atol=1e-4)


def test_a_bias_is_saved_loaded_and_forgotten(memory, tmp_path):
    other, query = ah.AssociativeMemory(PATTERNS[:9]), biased(PATTERNS[:7])
    state = memory.state_dict()
    other.load_state_dict(state)
    assert torch.equal(other.scores(query), memory.scores(query))
    for name in ("similarity.bias", "similarity.reach", "mixture.least"):  # a state dict of before
        del state[name]
    other.load_state_dict(state)
    assert other.similarity.bias is None
    assert other.similarity.reach == pytest.approx(REACH)
    other.load_state_dict(ah.AssociativeMemory(PATTERNS).state_dict())
    assert other.similarity.bias is None
    half = copy.deepcopy(memory).half()
    assert half.similarity.bias.dtype == torch.float32
    assert accuracy(half, query.half(), torch.arange(7)) == accuracy(memory, query, torch.arange(7))
    pytest.importorskip("safetensors", reason="memories are saved with safetensors")
    memory.save(tmp_path / "memory.safetensors")
    assert torch.equal(ah.AssociativeMemory.load(tmp_path / "memory.safetensors").scores(query), memory.scores(query))


def test_a_fit_starts_from_the_patterns_not_from_the_last_fit(memory):
    damage, fresh = ah.variants.Replaced((0.0, 0.5)), ah.AssociativeMemory(PATTERNS)
    for each in (memory, fresh):
        each.fit(damage)
    assert memory.similarity.bias is None
    for name, value in fresh.state_dict().items():
        assert torch.equal(memory.state_dict()[name], value), name
