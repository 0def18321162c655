"""Numerical checks of the paper's theorems and lemmas."""

from itertools import combinations

import pytest
import torch

import ahop_layers as ah
from ahop_layers.ops.reference import BASES, fold, sorted_similarities

UNEQUAL = torch.tensor([0, 1, 1, 2, 0, 3, 3, 3, 3, 4, 2, 0])


@pytest.mark.parametrize("base", ["dis", "dot", "l1"])
@pytest.mark.parametrize(("d", "blocks"), [(1, None), (8, None), (12, 1), (12, 3), (12, UNEQUAL)], ids=str)
def test_footprint_is_the_k_optimal_similarity(base, d, blocks):
    """Theorem "Equivalence form": the sum of the k largest similarities is the maximum over k-dimensional subspaces.

    With blocks, it is the maximum over the sums of any k blocks.
    """
    query, key = torch.randn(3, d, dtype=torch.float64), torch.randn(4, d, dtype=torch.float64)
    values = BASES[base].value(query[:, None], key[None])
    numbers = blocks if isinstance(blocks, torch.Tensor) else torch.arange(d) // (d // (blocks or d))
    n = int(numbers.max()) + 1
    values = torch.stack([values[..., numbers == block].sum(-1) for block in range(n)], -1)
    best = [
        torch.stack([values[..., list(subset)].sum(-1) for subset in combinations(range(n), k)]).amax(0)
        for k in range(1, n + 1)
    ]
    torch.testing.assert_close(ah.footprint(query, key, base, blocks), torch.stack(best, -1))


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_dot_init_is_the_dot_product(backend):
    query, key = torch.randn(2, 9, 64), torch.randn(2, 11, 64)
    similarity = ah.AdaptiveSimilarity(64)
    scores = ah.adaptive_similarity(query, key, similarity.beta[:, None] * similarity.w, backend=backend)
    exact = query.double() @ key.double().mT
    # Rounding error of a sum of 64 products.
    bound = 64 * torch.finfo(torch.float32).eps * (query.double().abs() @ key.double().abs().mT)
    assert ((scores - exact).abs() <= bound).all()


def test_isotropic_noise_retrieves_the_maximum_likelihood_pattern():
    """Lemma "isotropic noisy variant": the last footprint entry of ``dis`` ranks patterns by Gaussian likelihood."""
    variance, patterns = 0.7, torch.rand(200, 16, dtype=torch.float64) * 2 - 1
    query = patterns[torch.randint(200, (500,))] + variance**0.5 * torch.randn(500, 16, dtype=torch.float64)
    similarity = ah.AdaptiveSimilarity(16, bases=("dis",), init="dis").double()
    likelihood = torch.distributions.Normal(patterns[None], variance**0.5).log_prob(query[:, None]).sum(-1)
    assert torch.equal(similarity(query, patterns).argmax(-1), likelihood.argmax(-1))


def test_unsorted_footprint_is_optimal_for_anisotropic_noise():
    """Lemma "noisy variant": unsorted similarities, with ``w`` from the variances, have the ranking of the likelihood.

    With this package's sign, q = -(x - xi)^2, the folded weight of dimension i is 1 / sigma_i.
    """
    variances = torch.rand(12, dtype=torch.float64) + 0.1
    patterns, query = torch.randn(100, 12, dtype=torch.float64), torch.randn(300, 12, dtype=torch.float64)
    w = variances.reciprocal() - torch.cat([variances[1:].reciprocal(), variances.new_zeros(1)])
    torch.testing.assert_close(fold(w), variances.reciprocal())
    scores = BASES["dis"].value(query[:, None], patterns[None]).cumsum(-1) @ w
    likelihood = torch.distributions.Normal(patterns[None], variances.sqrt()).log_prob(query[:, None]).sum(-1)
    assert torch.equal(scores.argmax(-1), likelihood.argmax(-1))


@pytest.mark.parametrize("n", [24, 8])
def test_masked_lemma_by_its_own_formula(n):
    """Lemma "masked variant": w . delta(sorted) with w = 1 counts equal dimensions, the ranking of the likelihood.

    Counting equal blocks ranks patterns by likelihood if whole blocks are replaced, and not for other masks.
    """
    d, masked = 24, 0.5
    patterns = torch.randint(0, 4, (50, d)).double()  # few values, so that patterns share some
    index, mask = torch.randint(50, (400,)), torch.rand(400, n) < masked
    noise = torch.randint(0, 4, (400, d)).double()
    query = torch.where(mask.repeat_interleave(d // n, 1), noise, patterns[index])
    delta = (sorted_similarities(query, patterns, "dis", n) == 0).double()
    scores = delta @ torch.ones(n, dtype=torch.float64)
    equal = (query[:, None] == patterns[None]).unflatten(-1, (n, d // n)).all(-1)
    torch.testing.assert_close(scores, equal.double().sum(-1))
    by_chance = torch.tensor(masked * 0.25 ** (d // n), dtype=torch.float64)
    likelihood = torch.where(equal, (1 - masked + by_chance).log(), by_chance.log()).sum(-1)
    best = likelihood >= likelihood.amax(-1, keepdim=True) - 1e-9
    assert torch.equal(scores == scores.amax(-1, keepdim=True), best)
    assert (scores.gather(-1, index[:, None]) >= (~mask).sum(-1, keepdim=True)).all()
    # A mask that hits one dimension of each of 8 blocks leaves no block equal, although 16 of 24 dimensions are.
    query = patterns[index].clone()
    query[:, ::3] = 1 - query[:, ::3]
    scores = (sorted_similarities(query, patterns, "dis", 8) == 0).double().sum(-1)
    assert (scores.gather(-1, index[:, None]) == 0).all()


def test_debias_retrieves_every_biased_pattern():
    """Lemma "biased variant": with ``bias`` equal to the shift, every query retrieves its pattern, for any shift.

    The similarity of the lemma, 2 d . q - q . q for q = x - xi, differs from ``-|q - d|^2`` by a constant.
    """
    patterns, shift = torch.randn(300, 16, dtype=torch.float64), 5 * torch.randn(16, dtype=torch.float64)
    similarity = ah.AdaptiveSimilarity(16, init="dis", debias=True).double()
    plain = ah.AdaptiveSimilarity(16, init="dis").double()
    with torch.no_grad():
        similarity.bias.copy_(shift)
    assert torch.equal(similarity(patterns + shift, patterns).argmax(-1), torch.arange(300))
    assert not torch.equal(plain(patterns + shift, patterns).argmax(-1), torch.arange(300))
    query = torch.randn(30, 16, dtype=torch.float64)
    difference = query[:, None] - patterns[None]
    lemma = 2 * difference @ shift - difference.square().sum(-1)
    torch.testing.assert_close(similarity(query, patterns), lemma - shift @ shift)


def test_unified_energy_decreases_and_is_bounded():
    """Theorem "energy": E = -lse(-|x - xi|^2 + b . (x - xi)) decreases under x <- Xi softmax(s) + b/2 and is bounded.

    Each step decreases the energy by at least the squared step length, so the states converge.
    """
    patterns, b = 2 * torch.randn(20, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    similarity = ah.AdaptiveSimilarity(6, init="dis", debias=True).double()
    with torch.no_grad():
        similarity.bias.copy_(b / 2)  # -|x - b/2 - xi|^2 = s - |b|^2 / 4

    def scores(x):
        return similarity(x, patterns) + b @ b / 4

    x = 10 * torch.randn(64, 6, dtype=torch.float64)
    energy = -scores(x).logsumexp(-1)
    bound = -torch.log(torch.tensor(20.0, dtype=torch.float64)) - b @ b / 4
    for _ in range(30):
        before, x = x, scores(x).softmax(-1) @ patterns + b / 2
        following, moved = -scores(x).logsumexp(-1), (x - before).square().sum(-1)
        assert (energy - following >= moved - 1e-9).all()
        assert (following >= bound).all()
        energy = following
    assert moved.max() < 1e-6
