"""The associative memory: presets, energies, training, storage, memory use and errors."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from ahop_layers import errors
from ahop_layers.blocks import Blocks
from ahop_layers.errors import AHopError
from ahop_layers.memory import batches as batches_module
from ahop_layers.memory import fit as fit_module
from ahop_layers.memory import memory as memory_module
from ahop_layers.memory import scoring
from ahop_layers.memory.batches import retrieval_batches, seeded_generator
from ahop_layers.memory.estimates import best_inverse_temperature, estimate_bias
from ahop_layers.memory.kernel import KernelModulation, uniformity_loss
from ahop_layers.memory.losses import pattern_loss
from ahop_layers.memory.memory import AssociativeMemory
from ahop_layers.memory.presets import PRESETS
from ahop_layers.memory.table import AdaptiveTableSimilarity, TableSimilarity
from ahop_layers.separation import entmax15, sparsemax
from ahop_layers.similarity import AdaptiveSimilarity
from ahop_layers.training import folded_weights, trainable_forms
from ahop_layers.variants import Biased, Mixed, Noisy
from benchmarks.paper.retrieval.accuracy import most_likely, retrieval_accuracy, retrieval_error


def uniform(n, d, dtype=torch.float64):
    return torch.rand(n, d, dtype=dtype) * 2 - 1


# Similarity and separation of each network in the first table of the paper.
TABLE = {
    "Hop": (lambda x, p: x @ p.T, lambda s: s),
    "D-Hop": (lambda x, p: x @ p.T, lambda s: s**3),
    "E-Hop": (lambda x, p: x @ p.T, torch.exp),
    "M-Hop": (lambda x, p: x @ p.T, lambda s: s.softmax(-1)),
    "U-Hop": (
        lambda x, p: -(x[:, None] - p).abs().sum(-1),
        lambda s: functional.one_hot(s.argmax(-1), s.shape[-1]).double(),
    ),
    "S-Hop": (lambda x, p: x @ p.T, sparsemax),
    "K-Hop": (lambda x, p: x @ p.T, entmax15),
    "K2-Hop": (lambda x, p: x @ p.T, lambda s: s.softmax(-1)),
    "A-Hop": (lambda x, p: x @ p.T, lambda s: s.softmax(-1)),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_equal_the_paper(name):
    patterns, x = uniform(30, 8), uniform(7, 8)
    memory = AssociativeMemory.preset(name, patterns)
    similarity, separate = TABLE[name]
    scores = similarity(x, patterns)
    output = separate(scores) @ patterns
    torch.testing.assert_close(memory.scores(x), scores)
    torch.testing.assert_close(memory.retrieve(x), output.sign() if name in ("Hop", "D-Hop", "E-Hop") else output)
    assert torch.equal(memory.recall(x), scores.argmax(-1))


def test_a_kernel_is_a_dot_product_after_phi():
    patterns, x = uniform(30, 8), uniform(7, 8)
    memory = AssociativeMemory.preset("K2-Hop", patterns, features=5)
    phi = memory.modulation.phi
    torch.nn.init.normal_(phi)
    torch.testing.assert_close(memory.scores(x), (x @ phi.T) @ (patterns @ phi.T).T)


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 8), (0, 8)])
def test_leading_dimensions_are_kept(shape):
    memory, x = AssociativeMemory(uniform(30, 8), similarity="dis"), torch.rand(shape, dtype=torch.float64)
    assert memory.scores(x).shape == (*shape[:-1], 30)
    assert memory.recall(x).shape == shape[:-1]
    assert memory.retrieve(x, steps=2).shape == shape
    assert memory.energy(x).shape == shape[:-1]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("prior", [False, True])
def test_results_do_not_depend_on_the_block_size(name, prior, monkeypatch):
    memory, x = AssociativeMemory.preset(name, uniform(61, 8), prior=prior), uniform(23, 8)
    if prior:
        torch.nn.init.normal_(memory.prior)
    whole = memory.scores(x), memory.recall(x), memory.retrieve(x, steps=2)
    monkeypatch.setattr(scoring, "BLOCK_ELEMENTS", 8 * 7)
    monkeypatch.setattr(scoring, "BLOCK_SCORES", 61 * 5)
    torch.testing.assert_close((memory.scores(x), memory.recall(x), memory.retrieve(x, steps=2)), whole)


def adversarial_states(patterns):
    """States at the patterns, between two of them, far away, at zero, and random."""
    middle = (patterns[:-1] + patterns[1:]) / 2
    far = 1e3 * torch.randn(20, patterns.shape[1], dtype=patterns.dtype)
    return torch.cat(
        [patterns, middle, far, torch.zeros_like(patterns[:1]), torch.randn(60, patterns.shape[1]).double()]
    )


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


@pytest.mark.parametrize("name", ["M-Hop", "S-Hop", "K-Hop", "K2-Hop"])
def test_attention_energies_fall(name):
    patterns = uniform(40, 6) * 2
    memory = AssociativeMemory.preset(name, patterns)
    if memory.modulation is not None:
        torch.nn.init.normal_(memory.modulation.phi)
    x = adversarial_states(patterns)
    assert falls(memory, x)
    # The gradient of the energy is mod(x - T(x)), so it vanishes exactly at fixed points of the dynamics.
    x = uniform(9, 6).requires_grad_()
    (gradient,) = torch.autograd.grad(memory.energy(x).sum(), x)
    moved = x - memory(x)
    torch.testing.assert_close(gradient, moved if memory.modulation is None else memory.modulation(moved))


@pytest.mark.parametrize(("name", "keywords"), [("Hop", {}), ("D-Hop", {}), ("D-Hop", {"degree": 5}), ("E-Hop", {})])
def test_classic_energies_fall_on_binary_states(name, keywords):
    patterns = torch.randn(12, 16).sign().double()
    memory = AssociativeMemory.preset(name, patterns, **keywords)
    assert falls(memory, torch.cat([patterns, torch.randn(200, 16).sign().double()]))


def test_the_exponential_network_does_not_overflow():
    patterns = torch.randn(2, 1024).sign()
    patterns[1] = patterns[0]
    patterns[1, :256] *= -1
    memory = AssociativeMemory.preset("E-Hop", patterns)
    assert torch.equal(memory.retrieve(patterns), patterns)
    assert memory.energy(patterns).isfinite().all()


@pytest.mark.parametrize("name", ["Hop", "D-Hop", "E-Hop"])
def test_a_binary_state_is_never_zero(name):
    memory = AssociativeMemory.preset(name, torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, -1.0, -1.0]]))
    state = memory.retrieve(torch.tensor([[1.0, -1.0, 1.0, -1.0], [0.0, 0.0, 0.0, 0.0]]))
    assert set(state.unique().tolist()) <= {-1.0, 1.0}


def test_the_energy_can_increase_for_an_even_degree():
    memories = [AssociativeMemory.preset("D-Hop", torch.randn(12, 16).sign().double(), degree=2) for _ in range(10)]
    assert not all(falls(memory, torch.randn(500, 16).sign().double()) for memory in memories)


def test_learned_entmax_has_an_energy():
    memory = AssociativeMemory(uniform(40, 6) * 2, separation="entmax").double()
    torch.nn.init.constant_(memory.separation.alpha_logit, -0.7)
    assert falls(memory, adversarial_states(memory.patterns))


def test_the_universal_network_has_no_energy():
    with pytest.raises(AHopError, match=r"no energy is defined for a similarity other than the dot .* 'argmax'"):
        AssociativeMemory.preset("U-Hop", uniform(5, 3)).energy(uniform(2, 3))


def test_the_memory_itself_has_gradients():
    memory, x = AssociativeMemory.preset("A-Hop", uniform(10, 4), debias=True), uniform(3, 4).requires_grad_()
    torch.testing.assert_close(memory(x, steps=2), memory.retrieve(x, steps=2))
    assert not memory.retrieve(x).requires_grad
    memory(x, steps=2).square().sum().backward()
    assert all(gradient.abs().sum() > 0 for gradient in (x.grad, memory.similarity.w.grad, memory.similarity.bias.grad))


def test_steps_follow_the_bias():
    """A query with the learned bias converges to its pattern, and the retrieved pattern has no bias."""
    patterns, variant = 3 * torch.randn(50, 16), Biased(2.0)
    memory = AssociativeMemory.preset("A-Hop", patterns, init="dis", debias=True)
    with torch.no_grad():
        memory.similarity.bias.copy_(variant.shift(patterns))
    index, query = variant.sample(patterns, 40)
    for steps in (1, 2, 5):
        torch.testing.assert_close(memory.retrieve(query, steps=steps), patterns[index], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("keywords", [{}, {"table": True}])
def test_fit_improves_on_the_fixed_similarity(keywords):
    patterns, variant = uniform(200, 24, torch.float32), Mixed(0.3, 0.2, 0.5)
    index, query = variant.sample(patterns, 1000)
    memory = AssociativeMemory.preset("A-Hop", patterns, debias=True, **keywords)
    before, error = retrieval_accuracy(memory, index, query), retrieval_error(memory, index, query)
    losses = memory.fit(variant, epochs=120, batch=64, progress=False)
    after = retrieval_accuracy(memory, index, query)
    limit = (most_likely(variant, query, patterns) == index).double().mean().item()
    assert losses.shape == (120,)
    assert losses[-10:].mean() < losses[:10].mean()
    assert before + 0.15 < after <= limit + 0.01  # tolerance for 1000 random queries
    assert retrieval_error(memory, index, query) < error
    assert (memory.similarity.bias - variant.shift(patterns)).abs().mean() < 0.1
    assert memory.similarity.bias.requires_grad
    assert all(parameter.requires_grad for parameter in memory.parameters())


def test_the_same_seed_gives_the_same_bits():
    def fitted(seed):
        memory = AssociativeMemory.preset("A-Hop", torch.linspace(-1, 1, 200).reshape(20, 10).sin(), table=True)
        memory.fit(Noisy(0.3), epochs=5, batch=16, progress=False, seed=seed)
        return memory.state_dict()

    first, second, other = fitted(1), fitted(1), fitted(2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["similarity.w"], other["similarity.w"])


def test_a_zero_bias_is_initialized_to_its_least_squares_estimate():
    patterns, variant = uniform(50, 12, torch.float32) + 2.0, Mixed(0.3, 0.2, 0.6)  # with a nonzero mean
    pairs = variant.sample(patterns, 20_000)
    bias = torch.nn.Parameter(torch.zeros(12))
    estimate_bias(bias, pairs, patterns, 1, torch.Generator())
    torch.testing.assert_close(bias.detach(), variant.shift(patterns), atol=0.05, rtol=0)
    learned = bias.detach().clone()
    estimate_bias(bias, (pairs[0], pairs[1] + 1), patterns, 1, torch.Generator())
    assert torch.equal(bias.detach(), learned)  # a nonzero bias is kept


def test_every_epoch_uses_all_pairs():
    patterns = uniform(20, 8, torch.float32)
    pairs = Noisy(0.2).sample(patterns, 70)
    memory = AssociativeMemory.preset("K2-Hop", patterns)
    assert memory.fit(pairs, epochs=3, batch=32, progress=False).shape == (9,)
    assert not torch.equal(memory.modulation.phi, torch.eye(8))


def test_a_prior_learns_which_patterns_come_often():
    patterns = uniform(10, 4, torch.float32)
    index = torch.randint(2, (400,)) * 3  # only patterns 0 and 3
    memory = AssociativeMemory.preset("M-Hop", patterns, prior=True)
    memory.fit((index, Noisy(1.0).corrupt(patterns[index])), epochs=100, progress=False, lr=0.1)
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


@pytest.mark.parametrize(("form", "trained"), [(folded_weights, 2), (trainable_forms, 3)])
def test_a_reparametrization_leaves_the_scores_unchanged(form, trained):
    similarity = AdaptiveSimilarity(12, debias=True)
    with torch.no_grad():
        for parameter in similarity.parameters():
            parameter.normal_()
    query, key = torch.randn(5, 12), torch.randn(7, 12)
    before, parameter, names = similarity(query, key), similarity.w, list(similarity.state_dict())
    with form(similarity):
        torch.testing.assert_close(similarity(query, key), before)
        assert sum(p.requires_grad for p in similarity.parameters()) == trained  # u, bias, perhaps w; not beta
    torch.testing.assert_close(similarity(query, key), before)
    assert similarity.w is parameter
    assert similarity.beta.requires_grad
    assert sorted(similarity.state_dict()) == sorted(names)


@pytest.mark.parametrize(("variant", "share"), [(Mixed(0.7), 0.8), (Mixed(0.3, 0.3), 0.5)])
def test_fits_with_and_without_noise(variant, share):
    """Masks without noise need large weights, noise needs small ones. The default learning rate works for both."""
    patterns = uniform(100, 32, torch.float32)
    index, query = variant.sample(patterns, 500)
    memory = AssociativeMemory.preset("A-Hop", patterns)
    before = retrieval_accuracy(memory, index, query)
    memory.fit(variant, epochs=150, batch=64, progress=False)
    limit = (most_likely(variant, query, patterns) == index).double().mean().item()
    assert retrieval_accuracy(memory, index, query) > before + share * (limit - before)


def embeddings(seed, scale=1.0, count=200, dim=48, pairs=1500, dtype=torch.float32):
    """Unit vectors, and noisy queries with 70 % of the dimensions erased; all multiplied by ``scale``."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.nn.functional.normalize(torch.randn(count, dim, generator=generator, dtype=dtype), dim=-1)
    index = torch.randint(count, (pairs + 1000,), generator=generator)
    query = patterns[index] + 0.5 * torch.randn(len(index), dim, generator=generator, dtype=dtype) / dim**0.5
    query = scale * query * (torch.rand(query.shape, generator=generator) >= 0.7)
    return scale * patterns, (index[:pairs], query[:pairs]), (index[pairs:], query[pairs:])


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize(
    "keywords",
    [
        {"bases": ("l1",), "init": "l1"},
        {"bases": ("dot",)},
        {"bases": ("dis",), "init": "dis"},
        {},
        {"bases": ("l1", "dot", "dis"), "init": "uniform"},
        {"bases": ("l1", "dot"), "blocks": [Blocks(4, normalize=True), 48]},
        {"bases": ("l1", "dot"), "blocks": [48, Blocks(4, normalize=True)], "prior": True},
    ],
    ids=["l1", "dot", "dis", "both", "all", "normalized", "resolutions"],
)
def test_the_scale_of_the_data_does_not_change_what_is_found(keywords, debias):
    found = []
    for scale in (1.0, 2.0**-10 if debias else 2.0**10):  # powers of two: products are exact, so ties stay ties
        patterns, pairs, (_, query) = embeddings(0, scale, count=50, pairs=600, dtype=torch.float64)
        memory = AssociativeMemory.preset("A-Hop", patterns, debias=debias, **keywords)
        before = memory.recall(query)
        memory.fit(pairs, epochs=12, batch=128, progress=False)
        found.append((before, memory.recall(query)))
        assert not torch.equal(*found[-1])  # fit kept trained weights
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


def test_unit_embeddings_are_found_and_retrieved_at_another_scale():
    scale = 1e-3
    patterns, pairs, (index, query) = embeddings(3, scale, count=500, dim=64, pairs=4000)
    memory = AssociativeMemory.preset("A-Hop", patterns)
    memory.fit(pairs, epochs=5, progress=False)
    assert (memory.recall(query) == index).double().mean() >= 0.94
    assert 0.95 < memory.retrieve(query).norm(dim=-1).median() / scale < 1.05
    assert retrieval_accuracy(memory, index, query) >= 0.94


def test_patterns_drawn_with_the_seed_of_a_fit_do_not_reappear_in_its_queries():
    patterns = torch.rand(600, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    batches = retrieval_batches(Mixed(0.8), patterns, 1, 64, seeded_generator(patterns.device, 0))
    query = torch.cat([rows for _, rows in batches.held_out])
    equal = (query[:, None] == patterns).double().mean(-1)  # a fifth of the dimensions of the query's own pattern
    assert equal.max(-1).values.mean() == pytest.approx(0.2, abs=0.05)


def inverse_temperature(scores, index, batch=1000):
    batches = list(zip(index.split(batch), scores.split(batch), strict=True))
    beta = best_inverse_temperature(lambda query: query.chunk(2, -1), pattern_loss, batches)
    return beta.item()


def test_the_inverse_temperature_minimizes_the_loss():
    index = torch.randint(6, (3000,))
    scores = torch.randn(3000, 6)
    scores[torch.arange(3000), index] += 3.0  # the log-likelihood ratio of a shift of 3 is 3 times the score
    for factor in (1e-25, 1e-6, 1.0, 1e6, 1e25):
        assert 2.6 < factor * inverse_temperature(factor * scores, index) < 3.3
    scores[torch.arange(3000), index] -= 2.0  # the best factor would be 1
    assert 3.5 < inverse_temperature(scores, index) < 4.5  # logits with a deviation of 4
    assert inverse_temperature(torch.zeros(4, 3), torch.zeros(4).long()) == 4
    for factor in (1e-6, 1.0, 1e6):  # no factor lowers the loss; the deviation of six scores is 0.91
        assert factor * inverse_temperature(factor * torch.randn(3000, 6), index) == pytest.approx(4.4, rel=0.1)
    assert inverse_temperature(torch.eye(4), torch.arange(4)) < 100  # a loss without a minimum


def test_beta_multiplies_the_scores_in_separation_loss_and_energy():
    patterns, x = uniform(8, 5), uniform(3, 5)
    for name in ("M-Hop", "S-Hop", "K-Hop", "K2-Hop", "A-Hop"):
        memory = AssociativeMemory.preset(name, patterns, beta=3.0)
        plain = AssociativeMemory.preset(name, patterns)
        assert torch.equal(memory.scores(x), plain.scores(x))
        torch.testing.assert_close(memory.retrieve(x), plain.separation(3 * plain.scores(x)) @ patterns)
    memory, plain = (AssociativeMemory.preset("A-Hop", patterns, beta=beta) for beta in (3.0, None))
    torch.testing.assert_close(memory.energy(x), -(3 * plain.scores(x)).logsumexp(-1) / 3)
    assert plain.beta == 1
    index = torch.tensor([0, 1, 2])
    expected = torch.nn.functional.cross_entropy(3 * plain.scores(x), index)
    torch.testing.assert_close(pattern_loss(memory._logit_blocks(x), index), expected)


@pytest.mark.parametrize("name", ["M-Hop", "S-Hop"])
def test_energies_fall_at_any_inverse_temperature(name):
    patterns = uniform(30, 6)
    for beta in (0.3, 4.0):
        memory, x = AssociativeMemory.preset(name, patterns, beta=beta), uniform(20, 6)
        assert (memory.energy(memory.retrieve(x)) <= memory.energy(x) + 1e-9).all()


def test_a_fit_keeps_a_given_beta_and_sets_a_missing_one():
    patterns, pairs, _ = embeddings(0, count=50, pairs=400)
    for beta in (None, 2.0):
        memory = AssociativeMemory.preset("A-Hop", patterns, beta=beta)
        memory.fit(pairs, epochs=2, batch=128, progress=False)
        assert (memory.beta == 2.0).item() == (beta == 2.0)


def test_old_checkpoints_have_the_inverse_temperature_one():
    memory = AssociativeMemory.preset("M-Hop", uniform(5, 3), beta=4.0)
    state = memory.state_dict()
    other = AssociativeMemory(uniform(5, 3))
    other.load_state_dict(state)
    assert other.beta == 4
    del state["beta"]
    other.load_state_dict(state)
    assert other.beta == 1
    assert "beta" not in state
    pickled = other.__getstate__()
    pickled["_buffers"].pop("beta")
    pickled.pop("_fits_beta")
    old = AssociativeMemory.__new__(AssociativeMemory)
    old.__setstate__(pickled)
    assert old.beta == 1
    assert old._fits_beta


def test_a_fit_holds_queries_out_and_keeps_the_best_parameters(monkeypatch):
    patterns, (index, query), _ = embeddings(1, count=50, pairs=1000)
    batches = retrieval_batches((index, query), patterns, 1, 128, torch.Generator().manual_seed(0))
    drawn = torch.cat([rows for _, rows in batches.draws])
    held_query = torch.cat([rows for _, rows in batches.held_out])
    assert (len(drawn), len(held_query), batches.steps) == (900, 100, 8)
    assert not (drawn[:, None] == held_query).all(-1).any()
    few = retrieval_batches((index[:100], query[:100]), patterns, 1, 60, torch.Generator())
    assert [len(rows) for rows, _ in few.draws] == [50, 50]
    assert [len(rows) for rows, _ in few.held_out] == [100]
    monkeypatch.setattr(batches_module, "EVALUATED", 32)
    few = retrieval_batches((index[:100], query[:100]), patterns, 1, 60, torch.Generator())
    assert [len(rows) for rows, _ in few.held_out] == [60, 40]  # no more than a batch at once
    memory = AssociativeMemory.preset("A-Hop", patterns, beta=20.0)
    seen = []

    def recorded(blocks, target, shard):
        loss = pattern_loss(blocks, target, shard)
        if not loss.requires_grad:
            seen.append(loss.item())
        return loss

    monkeypatch.setattr(memory_module, "pattern_loss", recorded)
    memory.fit((index, query), epochs=10, batch=128, progress=False, lr=0.2)  # so large that the loss rises at times
    assert 10 <= len(seen) <= 13
    assert min(seen) < min(seen[0], seen[-1])
    held = retrieval_batches((index, query), patterns, 1, 128, seeded_generator(patterns.device, 0)).held_out
    loss = pattern_loss(memory._logit_blocks(held[0][1]), held[0][0])
    assert loss.item() == pytest.approx(min(seen), rel=1e-4)


def test_a_fit_that_does_not_improve_warns_and_changes_no_parameter():
    patterns, (index, query), _ = embeddings(1, count=50, pairs=1000)
    memory, x = AssociativeMemory.preset("A-Hop", patterns), query[:5]
    before = memory.scores(x)
    with pytest.warns(UserWarning, match="fit did not improve the loss of the held-out queries"):
        memory.fit((index, query), epochs=5, batch=64, progress=False, lr=100.0)
    torch.testing.assert_close(memory.scores(x), before)


def test_an_interrupted_fit_leaves_a_usable_memory():
    memory = AssociativeMemory.preset("A-Hop", uniform(10, 6, torch.float32))

    def failing():
        raise KeyboardInterrupt

    memory.similarity.register_forward_hook(lambda *_: failing())
    with pytest.raises(KeyboardInterrupt):
        memory.fit(Noisy(0.1), epochs=2, progress=False)
    assert isinstance(memory.similarity.w, torch.nn.Parameter)
    assert memory.similarity.beta.requires_grad


def test_add_and_remove_without_refitting():
    patterns, more = uniform(20, 8), uniform(5, 8)
    memory = AssociativeMemory.preset("A-Hop", patterns, init="dis", prior=True)
    torch.nn.init.constant_(memory.prior, 2.0)
    x = more + 0.01
    assert memory.add(more).tolist() == [20, 21, 22, 23, 24]
    assert torch.equal(memory.recall(x), torch.arange(20, 25))
    assert torch.equal(memory.prior.detach(), torch.full((25,), 2.0).double())
    memory.remove([0, 3, 24])
    assert torch.equal(memory.recall(x[:4]), torch.arange(18, 22))
    assert memory.prior.shape == (22,)
    memory.remove(torch.arange(22) != 5)
    torch.testing.assert_close(memory.patterns, patterns[7:8])
    with pytest.raises(AHopError, match="index must leave at least one pattern, got all 1"):
        memory.remove([0])


def test_bad_indices_are_named():
    memory = AssociativeMemory.preset("A-Hop", uniform(5, 3))
    memory.remove([])
    for index in ([7], 7, "a", 1.5, [0.0, 1.0], None, [None], {}, torch.ones(4, dtype=torch.bool)):
        with pytest.raises(AHopError, match="index must be indices or a mask of the 5 patterns, got"):
            memory.remove(index)
    assert len(memory.patterns) == 5
    query = uniform(2, 3)
    assert len(memory.fit(([0, 4], query), epochs=1, progress=False)) == 1
    assert len(memory.fit((torch.tensor([0, 4], dtype=torch.int32), query), epochs=1, progress=False)) == 1
    for index in ([0, 5], [0, -1], [0.0, 1.0], [True, False]):
        with pytest.raises(AHopError, match="index must be integers from 0 to 4, got"):
            memory.fit((torch.tensor(index), query), epochs=1, progress=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_non_finite_patterns_are_refused_with_their_row(value, dtype, monkeypatch):
    monkeypatch.setattr(errors, "FINITE_BLOCK", 4 * 7)  # seven rows per block
    patterns = uniform(40, 4, dtype)
    memory = AssociativeMemory(patterns)
    patterns = patterns.clone()
    patterns[[23, 31], [2, 0]] = value
    presets = [partial(AssociativeMemory.preset, "M-Hop"), partial(AssociativeMemory.preset, "A-Hop", table=True)]
    for make in (AssociativeMemory, memory.add, *presets):
        with pytest.raises(AHopError, match="patterns must be finite, got NaN or infinity in row 23"):
            make(patterns)
    assert len(memory.patterns) == 40
    for unchecked in (
        AssociativeMemory(patterns, check=False),
        AssociativeMemory.preset("A-Hop", patterns, check=False),
        AssociativeMemory.preset("D-Hop", patterns, check=False, degree=5),
    ):
        assert torch.equal(unchecked.patterns, patterns) or value != value
    assert len(memory.add(patterns, check=False)) == 40


def test_patterns_that_overflow_the_dtype_of_the_memory_are_refused():
    memory = AssociativeMemory(uniform(5, 3, torch.float16))
    with pytest.raises(AHopError, match="patterns must be finite, got NaN or infinity in row 1"):
        memory.add(torch.tensor([[1.0, 2.0, 3.0], [1.0, 1e5, 3.0]]))


@pytest.mark.parametrize("name", ["A-Hop", "K2-Hop"])
def test_a_diverging_fit_raises_and_leaves_the_parameters(name):
    memory = AssociativeMemory.preset(name, uniform(20, 6, torch.float32), prior=True)
    if name == "A-Hop":
        torch.nn.init.normal_(memory.similarity.w)
        torch.nn.init.constant_(memory.similarity.beta, 0.3)
    before = {key: value.clone() for key, value in memory.state_dict().items()}
    parameters = dict(memory.named_parameters())
    with pytest.raises(AHopError, match="loss and parameters must stay finite, got NaN or infinity by step"):
        memory.fit(Noisy(0.1), epochs=30, lr=1e37, progress=False)
    assert all(torch.equal(memory.state_dict()[key], value) for key, value in before.items())
    assert all(parameters[key] is parameter for key, parameter in memory.named_parameters())


def test_a_fit_on_non_finite_patterns_raises_at_the_first_look():
    patterns = uniform(20, 6, torch.float32)
    patterns[3, 2] = float("nan")
    memory = AssociativeMemory.preset("A-Hop", patterns, debias=True, check=False)
    with pytest.raises(AHopError, match=r"by step 0 with lr=0\.05"):
        memory.fit(Noisy(0.1), progress=False)
    assert not memory.similarity.bias.any()


def test_a_fit_refuses_non_finite_queries_and_keeps_the_bias_when_an_argument_is_bad():
    patterns = uniform(5, 3, torch.float32)
    memory, query = AssociativeMemory.preset("A-Hop", patterns, debias=True), patterns.clone()
    query[4, 1] = float("inf")
    with pytest.raises(AHopError, match="query must be finite, got NaN or infinity in row 4"):
        memory.fit((torch.arange(5), query), progress=False)
    with pytest.raises(AHopError, match="lr must be a positive number, got 0"):
        memory.fit(Biased(0.5), lr=0, progress=False)
    assert not memory.similarity.bias.any()


def test_a_fit_reads_only_a_few_losses(monkeypatch):
    """A read of a loss synchronizes with a GPU."""
    looks = []
    original = fit_module._check_finite
    monkeypatch.setattr(fit_module, "_check_finite", lambda *args: looks.append(args) or original(*args))
    AssociativeMemory.preset("A-Hop", uniform(5, 3)).fit(Noisy(0.1), epochs=200, batch=4, progress=False)
    assert len(looks) == 21


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_fit_takes_pairs_of_another_dtype(dtype):
    patterns = uniform(20, 6, torch.float32)
    memory = AssociativeMemory.preset("A-Hop", patterns, debias=True)
    losses = memory.fit((torch.arange(20), (patterns + 0.1).to(dtype)), epochs=3, progress=False)
    assert losses.isfinite().all()


def test_added_patterns_take_the_dtype_of_the_memory():
    memory = AssociativeMemory(uniform(5, 3, torch.float32))
    memory.add(uniform(2, 3))
    assert memory.patterns.dtype == torch.float32


def test_an_optimizer_still_updates_the_prior_after_loading():
    memory = AssociativeMemory.preset("M-Hop", uniform(5, 3), prior=True)
    optimizer = torch.optim.SGD(memory.parameters(), lr=1.0)
    memory.load_state_dict(AssociativeMemory.preset("M-Hop", uniform(5, 3), prior=True).state_dict())
    memory.scores(uniform(2, 3))[:, 0].sum().backward()
    optimizer.step()
    assert memory.prior[0] == -2


def test_loading_does_not_write_to_the_tensor_of_the_caller():
    patterns = uniform(5, 3)
    before, memory = patterns.clone(), AssociativeMemory(patterns)
    memory.load_state_dict(AssociativeMemory(uniform(5, 3)).state_dict())
    assert torch.equal(patterns, before)
    AssociativeMemory(uniform(1, 3).expand(5, 3)).load_state_dict(memory.state_dict())


def test_a_frozen_bias_and_a_scalar_bias_are_not_initialized():
    patterns = uniform(20, 4)
    memory = AssociativeMemory.preset("A-Hop", patterns, debias=True)
    memory.similarity.bias.requires_grad_(False)
    memory.fit(Biased(0.5), epochs=2, progress=False)
    assert not memory.similarity.bias.any()

    class Shifted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.ones(()))

        def forward(self, query, key):
            return query @ key.T + self.bias

    shifted, plain = AssociativeMemory(patterns, Shifted().double()), AssociativeMemory(patterns)
    torch.testing.assert_close(shifted.retrieve(patterns, steps=2), plain.retrieve(patterns, steps=2))
    assert len(shifted.fit(Biased(0.5), epochs=2, progress=False)) == 2


def test_distances_are_accurate_far_from_the_origin():
    patterns = torch.randn(200, 16)
    memory = AssociativeMemory(patterns + 3000, similarity="dis")
    assert torch.equal(memory.recall(patterns + 3000), torch.arange(200))
    binary = torch.randn(50, 16).sign()
    assert not AssociativeMemory(binary, similarity="dis").scores(binary).diagonal().any()  # exactly


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_universal_network_in_half_precision(dtype):
    patterns = torch.eye(4, dtype=dtype)
    assert torch.equal(AssociativeMemory.preset("U-Hop", patterns).recall(patterns), torch.arange(4))


def test_a_table_resets_to_zero():
    similarity = AdaptiveTableSimilarity(4)
    torch.nn.init.normal_(similarity.table.table)
    similarity.reset_parameters()
    assert not similarity.table.table.any()


def test_a_checkpoint_brings_its_own_number_of_patterns(tmp_path):
    memory = AssociativeMemory.preset("A-Hop", uniform(20, 8, torch.float32), debias=True, table=True, prior=True)
    for parameter in memory.parameters():
        torch.nn.init.normal_(parameter)
    torch.save(memory.state_dict(), tmp_path / "memory.pt")
    other = AssociativeMemory.preset("A-Hop", uniform(3, 8, torch.float32), debias=True, table=True, prior=True)
    other.load_state_dict(torch.load(tmp_path / "memory.pt", weights_only=True))
    x = uniform(6, 8, torch.float32)
    assert torch.equal(other.scores(x), memory.scores(x))
    assert other.prior.requires_grad
    with pytest.raises(RuntimeError, match="size mismatch for patterns"):
        AssociativeMemory(uniform(3, 9)).load_state_dict(AssociativeMemory(uniform(3, 8)).state_dict())


def broken_state_dicts(memory):
    good = memory.state_dict()
    nan = good["patterns"].clone()
    nan[1, 0] = float("nan")
    yield AHopError, "patterns must hold at least one pattern", good | {"patterns": good["patterns"][:0]}
    yield AHopError, "patterns must be finite, got NaN or infinity in row 1", good | {"patterns": nan}
    yield AHopError, r"prior must be \(N,\) = \(20,\), got \(3,\)", good | {"prior": torch.zeros(3)}
    yield RuntimeError, "size mismatch for patterns", good | {"patterns": torch.zeros(20, 9)}
    yield (
        AHopError,
        "must have 8 blocks, as the similarity, got similarity.w with 9",
        good | {"similarity.w": torch.zeros(2, 9)},
    )
    yield RuntimeError, "Unexpected key", good | {"other": torch.zeros(3)}
    yield RuntimeError, "Missing key", {key: value for key, value in good.items() if key != "similarity.bias"}
    yield RuntimeError, "patterns", good | {"patterns": "patterns"}


@pytest.mark.parametrize("count", [3, 20])
@pytest.mark.parametrize("assign", [False, True])
def test_a_failed_load_leaves_the_memory_unchanged(count, assign):
    source = AssociativeMemory.preset("A-Hop", uniform(20, 8), debias=True, prior=True)
    memory = AssociativeMemory.preset("A-Hop", uniform(count, 8), debias=True, prior=True)
    for parameter in (*source.parameters(), *memory.parameters()):
        torch.nn.init.normal_(parameter)
    before = {key: value.clone() for key, value in memory.state_dict().items()}
    parameters = dict(memory.named_parameters())
    for kind, message, state in broken_state_dicts(source):
        with pytest.raises(kind, match=message):
            memory.load_state_dict(state, assign=assign)
        assert all(torch.equal(memory.state_dict()[key], value) for key, value in before.items()), message
        assert all(parameters[key] is parameter for key, parameter in memory.named_parameters()), message
    memory.load_state_dict(source.state_dict(), assign=assign)
    assert torch.equal(memory.patterns, source.patterns)


def test_a_memory_inside_a_model_refuses_a_state_dict_without_patterns():
    model = torch.nn.Sequential(AssociativeMemory.preset("M-Hop", uniform(3, 8), prior=True))
    patterns, prior = model[0].patterns, model[0].prior
    state = model.state_dict() | {"0.patterns": torch.zeros(0, 8), "0.prior": torch.zeros(0)}
    with pytest.raises(AHopError, match=r"0\.patterns must hold at least one pattern, got \(0, 8\)"):
        model.load_state_dict(state)
    assert model[0].patterns is patterns
    assert model[0].prior is prior


def test_a_table_interpolates_and_extrapolates():
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


def test_a_table_adds_to_the_footprints():
    similarity = AdaptiveTableSimilarity(6, debias=True)
    for parameter in similarity.parameters():
        torch.nn.init.normal_(parameter)
    plain = AdaptiveSimilarity(6, debias=True)
    plain.load_state_dict({name: value for name, value in similarity.state_dict().items() if "table" not in name})
    query, key = torch.randn(4, 6), torch.randn(5, 6)
    expected = plain(query, key) + similarity.table(query - similarity.bias, key)
    torch.testing.assert_close(similarity(query, key), expected)


PEAK = """
import sys, torch
from pathlib import Path
from ahop_layers.memory.memory import AssociativeMemory
torch.manual_seed(0)
count, table = int(sys.argv[1]), sys.argv[2] == "table"
patterns = torch.rand(count, 64) * 2 - 1
memory = AssociativeMemory.preset("A-Hop", patterns, table=table, prior=True)
memory.recall(patterns[:2])
status = lambda name: int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0])
peaks = []
for _ in range(2):  # the peak includes pages that the allocator keeps, which vary
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmHWM")
    found = memory.recall(patterns[:16])
    peaks.append(status("VmHWM") - before)
print(min(peaks) // 1024, int((found == torch.arange(16)).sum()))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak of resident memory from Linux")
@pytest.mark.parametrize("kind", ["footprints", "table"])
def test_recall_needs_little_memory_beside_the_patterns(kind):
    """Blocks bound the memory independently of the number of patterns; without them a table would need 1.4 GB."""
    command = [sys.executable, "-c", PEAK, "150000", kind]
    megabytes, found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(found) == 16
    assert int(megabytes) < (40 if kind == "footprints" else 400)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: AssociativeMemory(p[0]), r"patterns must be \(N, d\) with N, d >= 1, got \(4,\)"),
        (lambda p: AssociativeMemory(p, similarity="cosine"), "similarity must be one of dot, dis, l1, adaptive, got"),
        (lambda p: AssociativeMemory(p, activation="relu"), "activation must be 'sign' or None, got 'relu'"),
        (lambda p: AssociativeMemory(p, objective="separation"), "needs a KernelModulation, got NoneType"),
        (lambda p: AssociativeMemory(p, objective="speed"), "objective must be one of retrieval, separation"),
        (lambda p: AssociativeMemory.preset("Z-Hop", p), "name must be one of Hop, D-Hop"),
        (lambda p: AssociativeMemory.preset("M-Hop", p, debias=True), "M-Hop takes .* prior, check, beta, got debias"),
        (
            lambda p: AssociativeMemory(p).scores(p[:, :3]),
            r"queries x must be \(..., d\) with the d = 4 of .* \(6, 3\)",
        ),
        (lambda p: AssociativeMemory(p).retrieve(p, steps=0), "steps must be .* at least 1, got 0"),
        (lambda p: AssociativeMemory(p).fit(Noisy(0.1)), "must have trainable parameters, got none"),
        (lambda p: AssociativeMemory(p, "adaptive").fit(), "data must be a variant or a pair .*, got NoneType"),
        (lambda p: AssociativeMemory(p, "adaptive").fit((torch.zeros(2).long(), p)), r"got \(2,\) and \(6, 4\)"),
        (lambda p: AssociativeMemory(p, "adaptive").fit(Noisy(0.1), epochs=0), "epochs must be .* at least 1, got 0"),
        (lambda p: AssociativeMemory(p, "adaptive").fit(Noisy(0.1), lr=0.0), "lr must be a positive number, got 0.0"),
        (lambda p: KernelModulation(0), "dim must be .* at least 1, got 0"),
        (lambda p: TableSimilarity(0), "dim must be .* at least 1, got 0"),
        (lambda p: TableSimilarity(4, 0.0), "key_range must be a positive number, got 0.0"),
        (lambda p: TableSimilarity(4, knots=(1, 5)), r"knots must be two integers of at least 2, got \(1, 5\)"),
    ],
)
def test_errors(make, message):
    with pytest.raises(AHopError, match=message):
        make(torch.rand(6, 4))


WRONG_TYPES = {
    "patterns": (lambda p: AssociativeMemory(None), "patterns must be a tensor, got NoneType"),
    "patterns of a preset": (lambda p: AssociativeMemory.preset("A-Hop", [1.0]), "patterns must be a tensor, got list"),
    "name": (lambda p: AssociativeMemory.preset(5, p), "name must be one of Hop, .* got 5"),
    "similarity": (lambda p: AssociativeMemory(p, 5), "similarity must be a module or a function, got 5"),
    "separation": (lambda p: AssociativeMemory(p, separation=5), "separation must be a module or a function, got 5"),
    "modulation": (lambda p: AssociativeMemory(p, modulation=5), "modulation must be a module or a function, got 5"),
    "degree": (lambda p: AssociativeMemory.preset("D-Hop", p, degree="a"), "degree must be .* got 'a'"),
    "features": (lambda p: AssociativeMemory.preset("K-Hop", p, features="a"), "features must be .* got 'a'"),
    "scores": (lambda p: AssociativeMemory(p).scores([1.0]), "x must be a tensor, got list"),
    "recall": (lambda p: AssociativeMemory(p).recall(None), "x must be a tensor, got NoneType"),
    "retrieve": (lambda p: AssociativeMemory(p).retrieve(None), "x must be a tensor, got NoneType"),
    "energy": (lambda p: AssociativeMemory.preset("K2-Hop", p).energy(None), "x must be a tensor, got NoneType"),
    "steps": (lambda p: AssociativeMemory(p).retrieve(p, steps="a"), "steps must be .* got 'a'"),
    "add": (lambda p: AssociativeMemory(p).add(None), "patterns must be a tensor, got NoneType"),
    "add another d": (lambda p: AssociativeMemory(p).add(p[:, :3]), r"patterns must be \(..., d\) with the d = 4 of"),
    "lr": (lambda p: AssociativeMemory(p, "adaptive").fit(Noisy(0.1), lr="a"), "lr must be a positive number, got 'a'"),
    "lr None": (lambda p: AssociativeMemory(p, "adaptive").fit(Noisy(0.1), lr=None), "lr must be a positive number"),
    "lr inf": (lambda p: AssociativeMemory(p, "adaptive").fit(Noisy(0.1), lr=float("inf")), "lr must be .* got inf"),
    "lr nan": (lambda p: AssociativeMemory(p, "adaptive").fit(Noisy(0.1), lr=float("nan")), "lr must be .* got nan"),
    "lr 1e300": (lambda p: AssociativeMemory(p, "adaptive").fit(Noisy(0.1), lr=1e300), "lr must be .* got 1e.300"),
    "data": (lambda p: AssociativeMemory(p, "adaptive").fit(5), "data must be a variant or a pair .* got int"),
    "data index": (lambda p: AssociativeMemory(p, "adaptive").fit(("a", p)), "index must be integers .* got str"),
    "data no index": (lambda p: AssociativeMemory(p, "adaptive").fit((None, p)), "index must be integers .* NoneType"),
    "data query": (lambda p: AssociativeMemory(p, "adaptive").fit(([0], None)), "query must be a tensor, got NoneType"),
    "data device": (lambda p: AssociativeMemory(p, "adaptive").fit(([0], p[:1].to("meta"))), "one device, got query"),
    "epochs": (lambda p: AssociativeMemory(p, "adaptive").fit(Noisy(0.1), epochs="a"), "epochs must be .* got 'a'"),
    "batch": (lambda p: AssociativeMemory(p, "adaptive").fit(Noisy(0.1), batch=2.5), "batch must be .* got 2.5"),
    "seed": (lambda p: AssociativeMemory(p, "adaptive").fit(Noisy(0.1), seed="a"), "seed must be an integer .* 'a'"),
    "seed size": (lambda p: AssociativeMemory(p, "adaptive").fit(Noisy(0.1), seed=2**70), "seed must be an integer"),
    "kernel": (lambda p: KernelModulation("a"), "dim must be .* got 'a'"),
    "key_range": (lambda p: TableSimilarity(4, "a"), "key_range must be a positive number, got 'a'"),
    "knots": (lambda p: TableSimilarity(4, knots=5), "knots must be two integers of at least 2, got 5"),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_wrong_types_are_named(name):
    make, message = WRONG_TYPES[name]
    with pytest.raises(AHopError, match=message):
        make(torch.rand(6, 4))


class _OfEachPattern(torch.nn.Module):
    """Separate weights for each pattern: a head of the similarity scores one pattern."""

    def __init__(self, count, dim):
        super().__init__()
        self.each = AdaptiveSimilarity(dim, num_heads=count)

    def forward(self, query, key):
        return self.each(query.expand(len(key), -1, -1), key[:, None]).squeeze(-1).T


def test_separate_weights_of_each_pattern_learn_as_fast_as_shared_ones():
    """A head learns from the queries of its pattern, so its gradients are small. Adam's eps must not exceed them."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(40, 32, generator=generator) * 2 - 1

    def draw(count):  # even patterns are strongly masked, odd ones are noisy
        index = torch.randint(0, 40, (count,), generator=generator)
        masked = Mixed(0.85).corrupt(patterns[index], generator)
        noisy = Noisy(1.0).corrupt(patterns[index], generator)
        return index, torch.where(index[:, None] % 2 == 0, masked, noisy)

    memory = AssociativeMemory(patterns, _OfEachPattern(40, 32))
    memory.fit(draw(4000), epochs=15, batch=256, progress=False)
    assert retrieval_accuracy(memory, *draw(4000)) > 0.675
