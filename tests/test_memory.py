"""The associative memory: presets, energies, training, storage, memory use and errors."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional

from ahop_layers import errors, training
from ahop_layers.errors import AHopError
from ahop_layers.memory import AdaptiveTableSimilarity, AssociativeMemory, KernelModulation, TableSimilarity, arrays
from ahop_layers.memory import memory as memory_module
from ahop_layers.memory import search as search_module
from ahop_layers.memory.presets import PRESETS, uniformity_loss
from ahop_layers.ops import chunked
from ahop_layers.separation import entmax15, sparsemax
from ahop_layers.similarity.adaptive import AdaptiveSimilarity
from ahop_layers.similarity.blocks import Blocks
from ahop_layers.variants import Custom, Mixed, Noisy
from benchmarks.paper.retrieval.accuracy import most_likely, retrieval_accuracy, retrieval_error
from tests.new_tensors import peak_memory
from tests.samples import refuses, unchanged


def uniform(n, d, dtype=torch.float64):
    return torch.rand(n, d, dtype=dtype) * 2 - 1


# Separation of each network in the first table of the paper. The similarity is the dot product, for U-Hop a distance.
TABLE = {
    "Hop": lambda s: s,
    "D-Hop": lambda s: s**3,
    "E-Hop": torch.exp,
    "U-Hop": lambda s: functional.one_hot(s.argmax(-1), s.shape[-1]).double(),
    "S-Hop": sparsemax,
    "K-Hop": entmax15,
    **dict.fromkeys(("M-Hop", "K2-Hop", "A-Hop"), lambda s: s.softmax(-1)),
}


@pytest.mark.parametrize("size", [7, 61], ids=lambda size: f"block{size}")
@pytest.mark.parametrize("name", PRESETS)
def test_presets_equal_the_paper_with_any_block_size(name, size, monkeypatch):
    monkeypatch.setattr(search_module, "BLOCK_ELEMENTS", 8 * size)
    monkeypatch.setattr(memory_module, "BLOCK_SCORES", 5 * 61)
    patterns, x = uniform(61, 8), uniform(23, 8)
    memory = AssociativeMemory.preset(name, patterns, prior=True)
    prior = torch.nn.init.normal_(memory.prior).detach()
    scores = prior - (x[:, None] - patterns).abs().sum(-1) if name == "U-Hop" else x @ patterns.T + prior
    output = TABLE[name](scores) @ patterns
    torch.testing.assert_close(memory.scores(x).detach(), scores)
    torch.testing.assert_close(memory.retrieve(x), output.sign() if name in ("Hop", "D-Hop", "E-Hop") else output)
    torch.testing.assert_close(memory.search(x, 3), tuple(scores.topk(3)))
    if name == "K2-Hop":  # a dot product after phi
        phi = torch.nn.init.normal_(memory.modulation.phi)
        torch.testing.assert_close(memory.scores(x), (x @ phi.T) @ (patterns @ phi.T).T + prior)


def adversarial_states(patterns):
    """States at the patterns, between two of them, far away, at zero, and random."""
    random = torch.randn(80, patterns.shape[1]).double()
    return torch.cat([patterns, (patterns[:-1] + patterns[1:]) / 2, 1e3 * random[:20], 0 * random[:1], random[20:]])


def falls(memory, x, steps=15):
    """Whether the energy never increases beyond rounding along the dynamics. The states include the bias."""
    bias = getattr(memory.similarity, "bias", None)
    energy = memory.energy(x)
    for _ in range(steps):
        x = memory.retrieve(x) + (0 if bias is None else bias.detach())
        following = memory.energy(x)
        if (following > energy + 1e-9 * energy.abs().clamp(min=1)).any():
            return False
        energy = following
    return True


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_the_unified_energy_falls_and_is_bounded(scale):
    patterns = scale * torch.randn(40, 6, dtype=torch.float64)
    memory = AssociativeMemory.preset("A-Hop", patterns, init="dis", debias=True)
    torch.nn.init.normal_(memory.similarity.bias, std=2.0)
    x = adversarial_states(patterns)
    assert falls(memory, x)
    # In the paper's form, -|x - xi|^2 + b . (x - xi) with b = 2 * bias, energies are lower by |b|^2 / 4.
    b = 2 * memory.similarity.bias
    unified = -((x[:, None] - patterns).square().neg().sum(-1) + (x[:, None] - patterns) @ b).logsumexp(-1)
    torch.testing.assert_close(memory.energy(x), unified + b @ b / 4)
    assert (unified >= -torch.tensor(40.0).double().log() - b @ b / 4 - 1e-9).all()


@pytest.mark.parametrize("beta", [0.3, 4.0])
@pytest.mark.parametrize("name", ["M-Hop", "S-Hop", "K-Hop", "K2-Hop", "learned entmax"])
def test_attention_energies_fall(name, beta):
    patterns = uniform(40, 6) * 2
    if name == "learned entmax":
        memory = AssociativeMemory(patterns, "dot", "entmax", beta=beta).double()
        torch.nn.init.constant_(memory.separation.alpha_logit, -0.7)
    else:
        memory = AssociativeMemory.preset(name, patterns, beta=beta)
    if memory.modulation is not None:
        torch.nn.init.normal_(memory.modulation.phi)
    assert falls(memory, adversarial_states(patterns))
    if name == "learned entmax":  # a bisection finds its threshold, which is not accurate enough for what follows
        return
    # The gradient of the energy is mod(x - T(x)), so it vanishes exactly at fixed points of the dynamics.
    x = uniform(9, 6).requires_grad_()
    (gradient,) = torch.autograd.grad(memory.energy(x).sum(), x)
    moved = x - memory(x)
    torch.testing.assert_close(gradient, moved if memory.modulation is None else memory.modulation(moved))


@pytest.mark.parametrize(("name", "keywords"), [("Hop", {}), ("D-Hop", {}), ("D-Hop", {"degree": 5}), ("E-Hop", {})])
def test_classic_energies_fall_on_binary_states(name, keywords):
    patterns = torch.randn(12, 16).sign().double()
    patterns[6:, 0] = -patterns[:6, 0]  # their sum is zero
    memory = AssociativeMemory.preset(name, patterns, **keywords)
    assert falls(memory, torch.cat([patterns, torch.randn(200, 16).sign().double()]))
    assert set(memory.retrieve(torch.zeros(16).double()).tolist()) <= {-1.0, 1.0}  # not zero
    patterns = torch.randn(1, 1024).sign() * torch.ones(2, 1)
    patterns[1, :256] *= -1
    memory = AssociativeMemory.preset(name, patterns, **keywords)  # an exponential must not overflow
    assert torch.equal(memory.retrieve(patterns)[0], patterns[0])
    assert memory.energy(patterns).isfinite().all()


def test_the_energy_can_increase_for_an_even_degree():
    memories = [AssociativeMemory.preset("D-Hop", torch.randn(12, 16).sign().double(), degree=2) for _ in range(10)]
    assert not all(falls(memory, torch.randn(500, 16).sign().double()) for memory in memories)


def test_the_memory_itself_has_gradients():
    memory, x = AssociativeMemory.preset("A-Hop", uniform(10, 4), debias=True), uniform(3, 4).requires_grad_()
    torch.testing.assert_close(memory(x, steps=2), memory.retrieve(x, steps=2))
    assert not memory.retrieve(x).requires_grad
    memory(x, steps=2).square().sum().backward()
    assert all(gradient.abs().sum() > 0 for gradient in (x.grad, memory.similarity.w.grad, memory.similarity.bias.grad))


def test_steps_follow_the_bias():
    """A query with the learned bias converges to its pattern, and the retrieved pattern has no bias."""
    patterns, variant = 3 * torch.randn(50, 16), Mixed(bias=2.0)
    memory = AssociativeMemory.preset("A-Hop", patterns, init="dis", debias=True)
    with torch.no_grad():
        memory.similarity.bias.copy_(variant.shift(patterns))
    index, query = variant.sample(patterns, 40)
    for steps in (1, 2, 5):
        torch.testing.assert_close(memory.retrieve(query, steps=steps), patterns[index], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "table", "share"), [
    (Mixed(0.3, 0.2, 0.5), False, 0.5),
    pytest.param(Mixed(0.3, 0.2, 0.5), True, 0.5, marks=pytest.mark.full),
    (Mixed(0.7), False, 0.8),
], ids=["bias", "table", "masks"])  # fmt: skip
def test_fit_improves_on_the_fixed_similarity(variant, table, share):
    """Masks without noise need large weights, noise needs small ones. The default learning rate works for both."""
    patterns = uniform(100, 24, torch.float32)
    index, query = variant.sample(patterns, 1000)
    memory = AssociativeMemory.preset("A-Hop", patterns, debias=True, table=table)
    before, error = retrieval_accuracy(memory, index, query), retrieval_error(memory, index, query)
    losses = memory.fit(variant, epochs=60, batch=128, progress=False)
    limit = (most_likely(variant, query, patterns) == index).double().mean().item()
    assert losses.shape == (60,)
    assert losses[-10:].mean() < losses[:10].mean()
    after = retrieval_accuracy(memory, index, query)
    assert before + share * (limit - before) < after <= limit + 0.01  # tolerance for 1000 random queries
    assert retrieval_error(memory, index, query) < error
    assert (memory.similarity.bias - variant.shift(patterns)).abs().mean() < 0.1
    assert all(parameter.requires_grad for parameter in memory.parameters())


def test_the_same_seed_gives_the_same_bits():
    def fitted(seed):
        memory = AssociativeMemory.preset("A-Hop", torch.linspace(-1, 1, 200).reshape(20, 10).sin(), table=True)
        memory.fit(Noisy(0.3), epochs=5, batch=16, progress=False, seed=seed)
        return memory.state_dict()

    first, second, other = fitted(1), fitted(1), fitted(2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["similarity.w"], other["similarity.w"])


def bias_after_a_fit(patterns, index, query, bias=0.0):
    """Returns the bias that a fit sets from the queries, before any step of a noticeable size."""
    memory = AssociativeMemory.preset("A-Hop", patterns, debias=True)
    torch.nn.init.constant_(memory.similarity.bias, bias)
    memory.fit((index, query), epochs=1, batch=len(index), lr=1e-9, progress=False)
    return memory.similarity.bias.detach()


@pytest.mark.filterwarnings("ignore:fit did not improve")
def test_a_zero_bias_is_initialized_to_its_least_squares_estimate():
    patterns, variant = uniform(50, 12, torch.float32) + 2.0, Mixed(0.3, 0.2, 0.6)  # with a nonzero mean
    index, query = variant.sample(patterns, 20_000)
    torch.testing.assert_close(bias_after_a_fit(patterns, index, query), variant.shift(patterns), atol=0.05, rtol=0)
    assert bias_after_a_fit(patterns, index, query, 1.0).sub(1).abs().max() < 1e-3  # a nonzero bias is kept
    patterns = 1000 * patterns
    query = patterns[3] + 0.3 * torch.randn(101, 12) + 7  # of one pattern: 101 equal rows have a rounded mean
    learned = bias_after_a_fit(patterns, torch.full((101,), 3), query)
    torch.testing.assert_close(learned, query.mean(0) - patterns[3], atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_every_epoch_uses_all_pairs_of_any_dtype(dtype):
    patterns = uniform(20, 8, torch.float32)
    index, query = Noisy(0.2).sample(patterns, 70)
    losses = AssociativeMemory.preset("K2-Hop", patterns).fit((index, query.to(dtype)), epochs=3, batch=32)
    assert losses.shape == (9,)
    assert losses.isfinite().all()


def test_a_prior_learns_which_patterns_come_often():
    patterns = uniform(10, 4, torch.float32)
    index = torch.randint(2, (400,)) * 3  # only patterns 0 and 3
    memory = AssociativeMemory.preset("M-Hop", patterns, prior=True)
    memory.fit((index, Noisy(1.0)(patterns[index])), epochs=100, progress=False, lr=0.1)
    common, rare = memory.prior[[0, 3]], memory.prior[[1, 2, 4, 5, 6, 7, 8, 9]]
    assert common.min() > rare.max() + 1


def test_separation_loss_moves_patterns_apart():
    patterns = torch.randn(100, 8) * torch.tensor([3.0] + [0.3] * 7)
    memory = AssociativeMemory.preset("K-Hop", patterns)
    before = memory.modulation.separation_loss(patterns)
    memory.fit(epochs=100, progress=False)
    after = memory.modulation.separation_loss(patterns)
    assert after < before - 0.5
    even = torch.nn.functional.normalize(torch.randn(100, 8), dim=-1)  # random directions
    assert after.item() == pytest.approx(uniformity_loss(even).item(), abs=0.3)


def test_uniformity_is_the_mean_over_pairs_of_directions():
    points = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    unit = (points / points.norm(dim=-1, keepdim=True)).flatten(0, 1)
    expected = torch.stack([(-2 * torch.pdist(each).square()).exp().mean().log() for each in unit]).reshape(2, 3)
    torch.testing.assert_close(uniformity_loss(points), expected)
    torch.testing.assert_close(uniformity_loss(7 * points), expected)
    assert torch.autograd.gradcheck(uniformity_loss, points)
    assert torch.equal(uniformity_loss(points[..., :1, :]), torch.zeros(2, 3))
    many = torch.randn(512, 64)
    torch.testing.assert_close(uniformity_loss(many.half()), uniformity_loss(many), rtol=1e-3, atol=1e-3)


def embeddings(seed, scale=1.0, count=200, dim=48, pairs=1500, dtype=torch.float32):
    """Unit vectors, and noisy queries with 70 % of the dimensions erased; all multiplied by ``scale``."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.nn.functional.normalize(torch.randn(count, dim, generator=generator, dtype=dtype), dim=-1)
    index = torch.randint(count, (pairs + 1000,), generator=generator)
    query = patterns[index] + 0.5 * torch.randn(len(index), dim, generator=generator, dtype=dtype) / dim**0.5
    query = scale * query * (torch.rand(query.shape, generator=generator) >= 0.7)
    return scale * patterns, (index[:pairs], query[:pairs]), (index[pairs:], query[pairs:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keywords", "scale"),  # powers of two: products are exact, so ties stay ties
    [
        ({}, 2.0**10),
        ({"bases": ("l1", "dot", "dis"), "init": "uniform"}, 2.0**10),
        ({"bases": ("l1", "dot"), "blocks": [48, Blocks(4, normalize=True)], "prior": True, "debias": True}, 2.0**-10),
    ],
    ids=["default", "all", "resolutions"],
)
def test_the_scale_of_the_data_does_not_change_what_is_found(keywords, scale):
    found = []
    for factor in (1.0, scale):
        patterns, pairs, (_, query) = embeddings(0, factor, count=50, pairs=600, dtype=torch.float64)
        memory = AssociativeMemory.preset("A-Hop", patterns, **keywords)
        before = memory.recall(query)
        memory.fit(pairs, epochs=12, batch=128, progress=False)
        found.append((before, memory.recall(query)))
        assert not torch.equal(*found[-1])  # fit kept trained weights
        assert 0.95 < memory.retrieve(pairs[1]).norm(dim=-1).median() / factor < 1.05  # unit vectors
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


def test_patterns_drawn_with_the_seed_of_a_fit_do_not_reappear_in_its_queries():
    patterns, seen = torch.rand(600, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1, []

    def damage(origin, generator):
        seen.append(Mixed(0.8)(origin, generator))
        return seen[-1]

    AssociativeMemory.preset("K2-Hop", patterns).fit(Custom(damage), epochs=1, batch=64, seed=0, progress=False)
    equal = (torch.cat(seen)[:200, None] == patterns).double().mean(-1)  # a fifth of the dimensions of its own pattern
    assert equal.max(-1).values.mean() == pytest.approx(0.2, abs=0.05)


def inverse_temperature(scores, index):
    """Returns the inverse temperature that a fit chooses: queries of one-hot patterns are scores."""
    memory = AssociativeMemory(torch.eye(scores.shape[1]), lambda query, key: query @ key.T, prior=True)
    memory.fit((index, scores), epochs=1, batch=10**5, lr=1e-9, progress=False)
    return memory.beta.item()


@pytest.mark.filterwarnings("ignore:fit did not improve")
def test_the_inverse_temperature_minimizes_the_loss():
    rows = torch.arange(30_000)
    index, scores = torch.randint(6, rows.shape), torch.randn(30_000, 6)
    scores[rows, index] += 3.0  # the log-likelihood ratio of a shift of 3 is 3 times the score
    for factor in (1e-25, 1e-6, 1.0, 1e6, 1e25):
        assert 2.6 < factor * inverse_temperature(factor * scores, index) < 3.3
    scores[rows, index] -= 2.0  # the best factor would be 1
    assert 3.5 < inverse_temperature(scores, index) < 4.5  # logits with a deviation of 4
    assert inverse_temperature(torch.zeros(4, 3), torch.zeros(4).long()) == 4
    for factor in (1e-6, 1.0, 1e6):  # no factor lowers the loss; the deviation of six scores is 0.91
        assert factor * inverse_temperature(factor * torch.randn(30_000, 6), index) == pytest.approx(4.4, rel=0.1)
    assert inverse_temperature(torch.eye(4), torch.arange(4)) < 100  # a loss without a minimum


def test_beta_multiplies_the_scores_in_separation_and_energy():
    patterns, x = uniform(8, 5), uniform(3, 5)
    for name in ("M-Hop", "S-Hop", "K-Hop", "K2-Hop", "A-Hop"):
        memory, plain = (AssociativeMemory.preset(name, patterns, beta=beta) for beta in (3.0, None))
        assert torch.equal(memory.scores(x), plain.scores(x))
        torch.testing.assert_close(memory.retrieve(x), plain.separation(3 * plain.scores(x)) @ patterns)
    torch.testing.assert_close(memory.energy(x), -(3 * plain.scores(x)).logsumexp(-1) / 3)
    assert plain.beta == 1


def test_a_fit_keeps_a_given_or_loaded_beta_and_sets_a_missing_one():
    patterns, pairs, _ = embeddings(0, count=50, pairs=400)
    state = AssociativeMemory.preset("A-Hop", patterns, beta=7.0).state_dict()
    for beta, kept in ((None, 1.0), (2.0, 2.0), (1.0, 7.0)):
        memory = AssociativeMemory.preset("A-Hop", patterns, beta=beta)
        if kept == 7:
            memory.load_state_dict(state)
        memory.fit(pairs, epochs=2, batch=128, progress=False)
        assert (memory.beta == kept).item() == (beta is not None)


def test_a_fit_holds_queries_out_and_keeps_the_best_parameters():
    patterns, (index, query), _ = embeddings(1, count=50, pairs=1000)
    memory = AssociativeMemory.preset("A-Hop", patterns, beta=20.0)
    trained, held, losses = [], [], []

    def watch(similarity, inputs, scores):
        rows = inputs[0].detach()
        if torch.is_grad_enabled():
            trained.append(rows)
            return scores
        if held and len(rows) != len(held[0]):  # those of the confidence
            return scores
        target = index[(rows[:, None] == query).all(-1).int().argmax(-1)]
        held.append(rows)
        scores = -scores if len(held) > 6 else scores  # later parameters look worse
        losses.append(functional.cross_entropy(20 * scores, target).item())
        return scores

    with memory.similarity.register_forward_hook(watch):
        memory.fit((index, query), epochs=10, batch=128, progress=False)
    assert len(torch.cat(trained).unique(dim=0)) == 900
    assert 10 <= len(held) <= 13
    assert all(torch.equal(rows, held[0]) for rows in held)
    assert len(torch.cat([*trained, held[0]]).unique(dim=0)) == 1000
    target = index[(held[0][:, None] == query).all(-1).int().argmax(-1)]
    assert min(losses) < min(losses[0], losses[-1])
    loss = functional.cross_entropy(20 * memory.scores(held[0]), target)
    assert loss.item() == pytest.approx(min(losses), rel=1e-4)


def test_a_fit_that_does_not_improve_warns_and_changes_no_parameter():
    patterns, pairs, _ = embeddings(1, count=50, pairs=1000)
    memory = AssociativeMemory.preset("A-Hop", patterns)
    before = memory.scores(patterns)
    with pytest.warns(UserWarning, match="fit did not improve the loss of the held-out queries") as warned:
        memory.fit(pairs, epochs=5, batch=64, progress=False, lr=100.0)
    assert warned[0].filename == __file__  # the line that called fit
    torch.testing.assert_close(memory.scores(patterns), before)


def test_add_and_remove_without_refitting():
    patterns, more = uniform(20, 8), uniform(5, 8)
    memory = AssociativeMemory.preset("A-Hop", patterns, init="dis", prior=True, labels=torch.arange(20))
    torch.nn.init.constant_(memory.prior, 2.0)
    x = more + 0.01
    assert memory.add(more, labels=np.arange(5)).tolist() == [20, 21, 22, 23, 24]
    assert torch.equal(memory.recall(x), torch.arange(20, 25))
    assert torch.equal(memory.prior.detach(), torch.full((25,), 2.0).double())
    memory.remove([0, 3, 24])
    assert torch.equal(memory.recall(x[:4]), torch.arange(18, 22))
    assert memory.prior.shape == (22,)
    assert memory.labels.tolist() == [1, 2, *range(4, 20), 0, 1, 2, 3]
    memory.remove(torch.arange(22) != 5)
    torch.testing.assert_close(memory.patterns, patterns[7:8])
    assert memory.labels.tolist() == [7]
    refuses("index must leave at least one pattern, got all 1", memory.remove, [0])


def test_bad_indices_are_named():
    memory = AssociativeMemory.preset("A-Hop", uniform(5, 3))
    memory.remove([])
    for index in ([7], 7, "a", 1.5, [0.0, 1.0], [None], {}, torch.ones(4, dtype=torch.bool)):
        refuses("index must be indices or a mask of the 5 patterns, got", memory.remove, index)
    assert len(memory.patterns) == 5
    for index in ([0, 4], torch.tensor([0, 4], dtype=torch.int32)):
        assert len(memory.fit((index, uniform(2, 3)), epochs=1, progress=False)) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_patterns_may_hold_nan_but_not_infinity_and_errors_name_the_row(dtype, monkeypatch):
    monkeypatch.setattr(errors, "FINITE_BLOCK", 4 * 7)  # seven rows per block
    memory, patterns = AssociativeMemory(uniform(40, 4, dtype)), uniform(40, 4, dtype)
    infinite, unknown, gaps = patterns.clone(), patterns.clone(), patterns.clone()
    infinite[[23, 31], [2, 0]], unknown[[24, 30]], gaps[[23, 31], [2, 0]] = -torch.inf, torch.nan, torch.nan
    makes = [AssociativeMemory, *(partial(AssociativeMemory.preset, "A-Hop", table=table) for table in (False, True))]
    for make in (memory.add, *makes):
        refuses(r"patterns must .*finite, got (NaN or )?infinity in row 23$", make, infinite)
        refuses("patterns must have a known value in each row, got NaN only in row 24", make, unknown)
    assert len(memory.patterns) == 40
    assert len(memory.add(infinite, check=False)) == len(memory.add(gaps)) == 40
    for make in makes[:2]:
        assert make(infinite, check=False).patterns.isinf().sum() == 2
    half = AssociativeMemory(uniform(5, 3, torch.float16))
    assert half.add(uniform(2, 3)).tolist() == [5, 6]
    assert half.patterns.dtype == torch.float16
    overflowing = torch.tensor([[1.0, 2.0, 3.0], [1.0, 1e5, 3.0]])
    refuses("patterns must not be infinite, got infinity in row 1", half.add, overflowing)


@pytest.mark.parametrize("similarity", [lambda query, key: query @ key.T, "dot", torch.nn.Bilinear(4, 4, 1)])
def test_nan_is_refused_where_a_similarity_has_no_unknown_values(similarity):
    modulation = KernelModulation(4) if similarity == "dot" else None  # the dot product alone allows it
    make = partial(AssociativeMemory, similarity=similarity, modulation=modulation)
    patterns = uniform(6, 4, torch.float32)
    memory, broken = make(patterns), patterns.clone()
    broken[2, 1] = torch.nan
    message = "must not hold NaN for this similarity, got NaN: similarity='auto' allows it"
    for call in (memory.add, make):
        refuses(f"patterns {message}", call, broken)
    for call in (memory.search, memory.scores, memory.recall, memory.retrieve):
        refuses(f"queries x {message}", call, broken)
    refuses(f"patterns {message}", memory.load_state_dict, memory.state_dict() | {"patterns": broken})
    refuses(f"patterns {message}", setattr, memory, "patterns", broken)
    refuses(f"queries {message}", memory.fit, (torch.arange(6), broken), epochs=1, progress=False)
    assert torch.equal(memory.patterns, patterns)


@pytest.mark.parametrize("name", ["A-Hop", "K2-Hop"])
def test_a_diverging_fit_raises_and_leaves_the_parameters(name):
    memory = AssociativeMemory.preset(name, uniform(20, 6, torch.float32), prior=True)
    if name == "A-Hop":
        torch.nn.init.normal_(memory.similarity.w)
        torch.nn.init.constant_(memory.similarity.beta, 0.3)
    message = "loss and parameters must stay finite, got NaN or infinity by step"
    with unchanged(memory):
        refuses(message, memory.fit, Noisy(0.1), epochs=30, lr=1e37, progress=False)


def test_a_fit_of_non_finite_values_or_with_a_bad_argument_keeps_the_bias():
    patterns = uniform(5, 3, torch.float32)
    memory, broken = AssociativeMemory.preset("A-Hop", patterns, debias=True), patterns.clone()
    broken[4, 1] = float("inf")
    refuses("query must not be infinite, got infinity in row 4", memory.fit, (torch.arange(5), broken), progress=False)
    refuses("lr must be a positive number, got 0", memory.fit, Mixed(bias=0.5), lr=0, progress=False)
    unchecked = AssociativeMemory.preset("A-Hop", broken, debias=True, check=False)
    refuses(r"by step 0 with lr=0\.05", unchecked.fit, Noisy(0.1), epochs=200, progress=False)  # at the first look
    assert not memory.similarity.bias.any()
    assert not unchecked.similarity.bias.any()


def test_loading_keeps_the_prior_of_an_optimizer_and_the_tensor_of_the_caller():
    patterns = uniform(5, 3)
    before, memory = patterns.clone(), AssociativeMemory.preset("M-Hop", patterns, prior=True)
    optimizer = torch.optim.SGD(memory.parameters(), lr=1.0)
    memory.load_state_dict(AssociativeMemory.preset("M-Hop", uniform(5, 3), prior=True).state_dict())
    assert torch.equal(patterns, before)
    memory.scores(uniform(2, 3))[:, 0].sum().backward()
    optimizer.step()
    assert memory.prior[0] == -2
    AssociativeMemory(uniform(1, 3).expand(5, 3), "dot", prior=True).load_state_dict(memory.state_dict())


def test_a_frozen_bias_and_a_scalar_bias_are_not_initialized():
    def shifted(query, key):
        return query @ key.T + shifted.bias

    patterns, shifted.bias = uniform(20, 4), torch.ones(()).double().requires_grad_()
    memory = AssociativeMemory.preset("A-Hop", patterns, debias=True)
    memory.similarity.bias.requires_grad_(False)
    memory.fit(Mixed(bias=0.5), epochs=2, progress=False)
    assert not memory.similarity.bias.any()
    memory, plain = AssociativeMemory(patterns, shifted, prior=True), AssociativeMemory(patterns, "dot")
    torch.testing.assert_close(memory.retrieve(patterns, steps=2), plain.retrieve(patterns, steps=2))
    assert len(memory.fit(Mixed(bias=0.5), epochs=2, progress=False)) == 2
    assert shifted.bias == 1


def test_distances_are_accurate_far_from_the_origin():
    patterns = torch.randn(200, 16)
    memory = AssociativeMemory(patterns + 3000, similarity="dis")
    assert torch.equal(memory.recall(patterns + 3000), torch.arange(200))
    binary = torch.randn(50, 16).sign()
    assert not AssociativeMemory(binary, similarity="dis").scores(binary).diagonal().any()  # exactly


def broken_state_dicts(memory):
    good = memory.state_dict()
    infinite, unknown = good["patterns"].clone(), good["patterns"].clone()
    infinite[1, 0], unknown[1] = float("inf"), float("nan")
    for kind, message, change in (
        (AHopError, r"patterns must be \(N, 8\) with N at least 1, got \(0, 8\)", {"patterns": good["patterns"][:0]}),
        (AHopError, "patterns must not be infinite, got infinity in row 1", {"patterns": infinite}),
        (AHopError, "patterns must have a known value in each row, got NaN only in row 1", {"patterns": unknown}),
        (AHopError, r"prior must be \(N,\) = \(20,\), got \(3,\)", {"prior": torch.zeros(3)}),
        (AHopError, r"labels must be \(N,\) = \(20,\)", {"labels": torch.zeros(3).long()}),
        (AHopError, "labels must be integers .* got torch.float32", {"labels": torch.zeros(20)}),
        (AHopError, r"patterns must be \(N, 8\)", {"patterns": torch.zeros(20, 9)}),
        (AHopError, "must have 8 blocks, as .* got similarity.w with 9", {"similarity.w": torch.zeros(2, 9)}),
        (RuntimeError, "Unexpected key", {"other": torch.zeros(3)}),
        (AHopError, "patterns must be .* got str", {"patterns": "patterns"}),
    ):
        yield kind, message, good | change
    for kind, message, missing in (
        (AHopError, "labels must be given, got none", "labels"),
        (RuntimeError, "Missing key", "similarity.bias"),
        (RuntimeError, "Missing key", "beta"),
    ):
        yield kind, message, {key: value for key, value in good.items() if key != missing}


@pytest.mark.parametrize("count", [3, 20])
@pytest.mark.parametrize("assign", [False, True])
def test_a_failed_load_leaves_the_memory_unchanged(count, assign):
    source, memory = (
        AssociativeMemory.preset("A-Hop", uniform(n, 8), debias=True, prior=True, labels=range(n)) for n in (20, count)
    )
    for parameter in (*source.parameters(), *memory.parameters()):
        torch.nn.init.normal_(parameter)
    for kind, message, state in broken_state_dicts(source):
        with unchanged(memory), pytest.raises(kind, match=message):
            memory.load_state_dict(state, assign=assign)
    load, message = torch.nn.Sequential(memory).load_state_dict, r"\(N, 8\) with N at least 1, got \(0, 8\)"
    refuses(rf"0\.patterns must be {message}", load, {"0.patterns": torch.zeros(0, 8)}, strict=False, assign=assign)
    memory.load_state_dict(source.state_dict(), assign=assign)
    assert all(torch.equal(memory.state_dict()[key], value) for key, value in source.state_dict().items())
    assert memory.prior.requires_grad


def test_a_table_interpolates_extrapolates_and_adds_to_the_footprints():
    similarity = TableSimilarity(1, 1.0, knots=(3, 2)).double()
    values = torch.tensor([[1.0, 2.0], [0.0, 4.0], [5.0, 6.0]], dtype=torch.float64)
    with torch.no_grad():
        similarity.table.copy_(values)
    query = torch.tensor([[-2.0], [-1.0], [2.0], [4.0], [-4.0]], dtype=torch.float64)
    low, high = torch.tensor([[-1.0]], dtype=torch.float64), torch.tensor([[1.0]], dtype=torch.float64)
    assert similarity(query, low).squeeze().tolist() == [1.0, 0.5, 5.0, 10.0, 2.0]
    assert similarity(query, (low + high) / 2).squeeze().tolist() == [1.5, 1.75, 5.5, 9.0, 1.0]
    inside = 0.9 * uniform(3, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k: similarity(q, k), (inside, uniform(5, 4).requires_grad_()))
    added = AdaptiveTableSimilarity(6, debias=True)
    for parameter in added.parameters():
        torch.nn.init.normal_(parameter)
    plain = AdaptiveSimilarity(6, debias=True)
    plain.load_state_dict({name: value for name, value in added.state_dict().items() if "table" not in name})
    query, key = torch.randn(4, 6), torch.randn(5, 6)
    torch.testing.assert_close(added(query, key), plain(query, key) + added.table(query - added.bias, key))
    added.reset_parameters()
    assert not added.table.table.any()


def test_half_precision_memories_have_an_inverse_temperature_beyond_float16():
    patterns = torch.nn.functional.normalize(torch.randn(50, 32), dim=-1) * 0.01
    labels = torch.arange(50) % 5
    plain = AssociativeMemory(patterns, "dot", labels=labels, beta=2e5)
    for memory in (AssociativeMemory(patterns.half(), "dot", labels=labels, beta=2e5), copy.deepcopy(plain).half()):
        assert memory.beta == 2e5
        assert memory.double().beta.dtype == torch.float64
        memory.half()
        for method in ("retrieve", "class_scores", "energy"):
            result, expected = (getattr(each, method)(patterns) for each in (memory, plain))
            assert result.dtype == torch.float16
            torch.testing.assert_close(result.float(), expected, atol=2e-5, rtol=0.1)


@pytest.mark.parametrize("beta", [1e-50, 1e39])
def test_beta_is_within_the_range_of_the_dtype(beta):
    refuses("beta must be a positive number within the range of", AssociativeMemory, torch.eye(3), beta=beta)
    assert AssociativeMemory(torch.eye(3).double(), beta=beta).beta == beta


@pytest.mark.filterwarnings("ignore:fit did not improve")
def test_numpy_arrays_are_accepted_everywhere():
    patterns, labels = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32), np.arange(20) % 3
    memory = AssociativeMemory.preset("A-Hop", patterns, labels=labels, prior=True)
    memory.fit((np.arange(20), patterns), by="pattern", epochs=np.int64(2), batch=np.int32(8), progress=False)
    memory.fit((labels, patterns), by="label", epochs=2, progress=False)
    for shortlist in (None, np.int64(8)):
        assert memory.search(patterns, np.int64(3), shortlist)[1].shape == (20, 3)
    assert memory.retrieve(patterns, steps=np.int64(2)).shape == (20, 4)
    assert memory.add(patterns, labels=labels).tolist() == list(range(20, 40))


def test_a_fit_in_inference_mode_or_of_float16_is_refused():
    memory = AssociativeMemory.preset("A-Hop", torch.randn(20, 8).half(), debias=True, prior=True, table=True)
    refuses(r"got torch.float16: call memory.float\(\)", memory.fit, Noisy(std=0.1), epochs=2, progress=False)
    assert memory.float().fit(Noisy(std=0.1), epochs=2, progress=False).isfinite().all()
    with torch.inference_mode():
        refuses("fit needs gradients", memory.fit, Noisy(std=0.1), epochs=1, progress=False)
        memory = AssociativeMemory(torch.randn(5, 3))
    refuses("build_index needs patterns created outside inference mode", memory.build_index, "Flat")


@pytest.mark.parametrize(("table", "limit"), [(False, 2**20), (True, 2**23)])
def test_recall_needs_little_memory_beside_the_patterns(table, limit, monkeypatch):
    """Blocks bound the memory independently of the number of patterns; without them a table would need 200 MB."""
    monkeypatch.setattr(search_module, "BLOCK_ELEMENTS", 2**15)
    monkeypatch.setattr(arrays, "RANKED_SCORES", 2**15)
    monkeypatch.setattr(chunked, "SCRATCH_BYTES", 2**18)
    memory = AssociativeMemory.preset("A-Hop", uniform(20_000, 64, torch.float32), table=table, prior=True)
    found, held = peak_memory(lambda: memory.recall(memory.patterns[:16]))
    assert found.tolist() == list(range(16))
    assert held < limit


NOISY = Noisy(0.1)


def fit(p, data, **keywords):
    return AssociativeMemory(p, "adaptive").fit(data, **keywords)


@pytest.mark.parametrize(("make", "message"), [
    (lambda p: AssociativeMemory(None), "patterns must be a tensor, an array or a list of numbers, got NoneType"),
    (lambda p: AssociativeMemory(p[0]), r"patterns must be \(N, d\), or images .* got \(4,\)"),
    (lambda p: AssociativeMemory(p, "cosine"), "similarity must be one of auto, dot, dis, l1, adaptive, got"),
    (lambda p: AssociativeMemory(p, 5), "similarity must be a module or a function, got 5"),
    (lambda p: AssociativeMemory(p, separation=5), "separation must be a module or a function, got 5"),
    (lambda p: AssociativeMemory(p, modulation=5), "modulation must be a module or a function, got 5"),
    (lambda p: AssociativeMemory(p, activation="relu"), "activation must be 'sign' or None, got 'relu'"),
    (lambda p: AssociativeMemory(p, objective="separation"), "needs a KernelModulation, got NoneType"),
    (lambda p: AssociativeMemory(p, objective="speed"), "objective must be one of retrieval, separation"),
    (lambda p: AssociativeMemory.preset(5, p), "name must be one of Hop, D-Hop.* got 5"),
    (lambda p: AssociativeMemory.preset("M-Hop", p, debias=True), "M-Hop takes .* prior, check, beta, got debias"),
    (lambda p: AssociativeMemory.preset("D-Hop", p, degree="a"), "degree must be .* got 'a'"),
    (lambda p: AssociativeMemory.preset("K-Hop", p, features="a"), "features must be .* got 'a'"),
    (lambda p: AssociativeMemory.preset("U-Hop", p).energy(p), "no energy .* other than the dot .* 'argmax'"),
    (lambda p: AssociativeMemory(p).retrieve(p, steps=0), "steps must be .* at least 1, got 0"),
    (lambda p: AssociativeMemory(p).add(p[:, :3]), r"patterns must be \(n, 4\), as those stored"),
    (lambda p: AssociativeMemory(p, "dot").fit(NOISY), "must have trainable parameters, got none"),
    (lambda p: fit(p, None, epochs=1), "data must be a variant or a pair .*, got NoneType"),
    (lambda p: fit(p, ("a", p)), "index must be integers .* got str"),
    (lambda p: fit(p, ([0], p[:1].to("meta"))), "one device, got query"),
    (lambda p: fit(p, NOISY, epochs=0), "epochs must be .* at least 1, got 0"),
    (lambda p: fit(p, NOISY, batch=2.5), "batch must be .* got 2.5"),
    (lambda p: fit(p, NOISY, lr=float("inf")), "lr must be a positive number, got inf"),
    (lambda p: fit(p, NOISY, lr=1e300), "lr must be .* got 1e.300"),
    (lambda p: KernelModulation(0), "dim must be .* at least 1, got 0"),
    (lambda p: TableSimilarity(0), "dim must be .* at least 1, got 0"),
    (lambda p: TableSimilarity(4, 0.0), "key_range must be a positive number, got 0.0"),
    (lambda p: TableSimilarity(4, knots=(1, 5)), r"knots must be two integers of at least 2, got \(1, 5\)"),
    (lambda p: TableSimilarity(4, knots=5), "knots must be two integers of at least 2, got 5"),
])  # fmt: skip
def test_errors(make, message):
    refuses(message, make, torch.rand(6, 4))


class _OfEachPattern(torch.nn.Module):
    """Separate weights for each pattern: a head of the similarity scores one pattern."""

    def __init__(self, count, dim):
        super().__init__()
        self.each = AdaptiveSimilarity(dim, num_heads=count)

    def forward(self, query, key):
        return self.each(query.expand(len(key), -1, -1), key[:, None]).squeeze(-1).T


@pytest.mark.full
def test_separate_weights_of_each_pattern_learn_as_fast_as_shared_ones(monkeypatch):
    """A head learns from the queries of its pattern, so its gradients are small. Adam's eps must not exceed them."""
    patterns, accuracy = uniform(40, 32, torch.float32), []
    index = torch.randint(0, 40, (8000,))  # even patterns are strongly masked, odd ones are noisy
    masked, noisy = (variant(patterns[index]) for variant in (Mixed(0.85), Noisy(1.0)))
    query = torch.where(index[:, None] % 2 == 0, masked, noisy)
    for factor in (1, 40):  # 40 times as large: the eps of weights that are shared by all patterns
        monkeypatch.setattr(training, "FORM_EPS", factor * training.FORM_EPS)
        memory = AssociativeMemory(patterns, _OfEachPattern(40, 32))
        memory.fit((index[:4000], query[:4000]), epochs=15, batch=256, progress=False)
        accuracy.append(retrieval_accuracy(memory, index[4000:], query[4000:]))
    assert accuracy[0] > accuracy[1] + 0.01
