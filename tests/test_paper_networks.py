"""The networks of the paper: retrieval, energies, training by gradients, kernels and tables."""

from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional

import ahop_layers as ah
from ahop_layers.memory.variants import Mixed, Noisy
from ahop_layers.ops.reference import fold
from ahop_layers.separation import entmax15, sparsemax
from benchmarks.paper.kernel_similarity import uniformity_loss
from benchmarks.paper.networks import NETWORKS, Network, Power
from benchmarks.paper.retrieval.accuracy import most_likely, retrieval_accuracy, retrieval_error
from benchmarks.paper.table import KNOTS, TableSimilarity
from benchmarks.paper.training import best_inverse_temperature, folded_weights, least_squares_bias, train, warmup_cosine
from tests.samples import refuses


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
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_equal_the_paper(name):
    patterns, x = uniform(61, 8), uniform(23, 8)
    network = NETWORKS[name](patterns, prior=True)
    prior = nn.init.normal_(network.prior).detach()
    scores = prior - (x[:, None] - patterns).abs().sum(-1) if name == "U-Hop" else x @ patterns.T + prior
    output = TABLE.get(name, lambda s: s.softmax(-1))(scores) @ patterns
    torch.testing.assert_close(network.scores(x), scores)
    torch.testing.assert_close(network.retrieve(x), output.sign() if name in ("Hop", "D-Hop", "E-Hop") else output)
    assert torch.equal(network.recall(x), scores.argmax(-1))
    if name == "K2-Hop":  # a dot product after phi
        phi = nn.init.normal_(network.modulation.phi)
        torch.testing.assert_close(network.scores(x), (x @ phi.T) @ (patterns @ phi.T).T + prior)


def adversarial_states(patterns):
    """States at the patterns, between two of them, far away, at zero, and random."""
    random = torch.randn(80, patterns.shape[1]).double()
    return torch.cat([patterns, (patterns[:-1] + patterns[1:]) / 2, 1e3 * random[:20], 0 * random[:1], random[20:]])


@torch.no_grad()
def falls(network, x, steps=15):
    """Whether the energy never increases beyond rounding along the dynamics. The states include the bias."""
    energy = network.energy(x)
    for _ in range(steps):
        x = network(x) + (0 if network.bias is None else network.bias)
        following = network.energy(x)
        if (following > energy + 1e-9 * energy.abs().clamp(min=1)).any():
            return False
        energy = following
    return True


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_the_unified_energy_falls_and_is_bounded(scale):
    patterns = scale * torch.randn(40, 6, dtype=torch.float64)
    network = Network(patterns, ah.AdaptiveSimilarity(6, init="dis", debias=True).double())
    b = 2 * nn.init.normal_(network.bias, std=2.0).detach()
    x = adversarial_states(patterns)
    assert falls(network, x)
    # In the paper's form, -|x - xi|^2 + b . (x - xi) with b = 2 * bias, energies are lower by |b|^2 / 4.
    unified = -((x[:, None] - patterns).square().neg().sum(-1) + (x[:, None] - patterns) @ b).logsumexp(-1)
    torch.testing.assert_close(network.energy(x), unified + b @ b / 4)
    assert (unified >= -torch.tensor(40.0).double().log() - b @ b / 4 - 1e-9).all()


@pytest.mark.parametrize("beta", [0.3, 4.0])
@pytest.mark.parametrize("name", ["M-Hop", "S-Hop", "K-Hop", "K2-Hop", "learned entmax"])
def test_attention_energies_fall(name, beta):
    patterns, learned = uniform(40, 6) * 2, name == "learned entmax"
    network = (
        Network(patterns, separation="entmax", beta=beta) if learned else NETWORKS[name](patterns, beta=beta)
    ).double()
    for parameter in network.parameters():
        nn.init.constant_(parameter, -0.7) if learned else nn.init.normal_(parameter)
    assert falls(network, adversarial_states(patterns))
    if learned:  # a bisection finds its threshold, which is not accurate enough for what follows
        return
    # The gradient of the energy is mod(x - T(x)), so it vanishes exactly at fixed points of the dynamics.
    x = uniform(9, 6).requires_grad_()
    (gradient,) = torch.autograd.grad(network.energy(x).sum(), x)
    moved = x - network(x)
    torch.testing.assert_close(gradient, moved if network.modulation is None else network.modulation(moved))


@pytest.mark.parametrize("name", ["Hop", "D-Hop", "D-Hop, degree 5", "E-Hop"])
def test_classic_energies_fall_on_binary_states(name):
    def make(patterns):
        return Network(patterns, separation=Power(5), binary=True) if "5" in name else NETWORKS[name](patterns)

    patterns = torch.randn(12, 16).sign().double()
    patterns[6:, 0] = -patterns[:6, 0]  # their sum is zero
    assert falls(make(patterns), torch.cat([patterns, torch.randn(200, 16).sign().double()]))
    assert set(make(patterns).retrieve(torch.zeros(1, 16).double())[0].tolist()) <= {-1.0, 1.0}  # not zero
    patterns = torch.randn(1, 1024).sign() * torch.ones(2, 1)
    patterns[1, :256] *= -1
    network = make(patterns)  # an exponential must not overflow
    assert torch.equal(network.retrieve(patterns)[0], patterns[0])
    assert network.energy(patterns).isfinite().all()


def test_the_energy_can_increase_for_an_even_degree_and_u_hop_has_none():
    makes = [Network(torch.randn(12, 16).sign().double(), separation=Power(2), binary=True) for _ in range(10)]
    assert not all(falls(network, torch.randn(500, 16).sign().double()) for network in makes)
    refuses(
        "energy needs the dot product or softmax, got .*'argmax'",
        NETWORKS["U-Hop"](uniform(5, 3)).energy,
        uniform(2, 3),
    )


def test_beta_multiplies_the_scores_in_separation_and_energy():
    patterns, x = uniform(8, 5), uniform(3, 5)
    for name in ("M-Hop", "S-Hop", "K-Hop", "K2-Hop", "A-Hop"):
        network, plain = (NETWORKS[name](patterns, beta=beta) for beta in (3.0, None))
        assert torch.equal(network.scores(x), plain.scores(x))
        torch.testing.assert_close(network.retrieve(x), plain.separation(3 * plain.scores(x)) @ patterns)
    torch.testing.assert_close(network.energy(x), -(3 * plain.scores(x)).logsumexp(-1) / 3)


def test_steps_follow_the_bias():
    """A query with the learned bias converges to its pattern, and the retrieved pattern has no bias."""
    patterns, variant = 3 * torch.randn(50, 16), Mixed(bias=2.0)
    network = Network(patterns, ah.AdaptiveSimilarity(16, init="dis", debias=True))
    network.bias.data.copy_(variant.shift(patterns))
    index, query = variant.sample(patterns, 40)
    for steps in (1, 2, 5):
        torch.testing.assert_close(network.retrieve(query, steps), patterns[index], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "name", "share"), [
    (Mixed(0.3, 0.2, 0.5), "A-Hop, debias", 0.5),
    pytest.param(Mixed(0.3, 0.2, 0.5), "A-Hop, debias, table", 0.5, marks=pytest.mark.full),
    (Mixed(0.7), "A-Hop, debias", 0.8),
], ids=["bias", "table", "masks"])  # fmt: skip
def test_training_improves_on_the_fixed_similarity(variant, name, share):
    """Masks without noise need large weights, noise needs small ones. The default learning rate works for both."""
    patterns = uniform(100, 24, torch.float32)
    index, query = variant.sample(patterns, 1000)
    network = NETWORKS[name](patterns)
    before, error = retrieval_accuracy(network, index, query), retrieval_error(network, index, query)
    losses = train(network, variant, 60, batch=128)
    limit = (most_likely(variant, query, patterns) == index).double().mean().item()
    assert losses.shape == (60,)
    assert losses[-10:].mean() < losses[:10].mean()
    after = retrieval_accuracy(network, index, query)
    assert before + share * (limit - before) < after <= limit + 0.01  # tolerance for 1000 random queries
    assert retrieval_error(network, index, query) < error
    assert (network.bias - variant.shift(patterns)).abs().mean() < 0.1
    assert all(parameter.requires_grad for parameter in network.parameters())


def test_the_seed_determines_training_and_the_best_parameters_are_kept():
    def trained(seed, lr=0.05):
        network = NETWORKS["A-Hop, debias, table"](torch.linspace(-1, 1, 200).reshape(20, 10).sin())
        train(network, Noisy(0.3), 5, lr, 16, seed)
        return network.state_dict()

    first, second, other = trained(1), trained(1), trained(2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["similarity.adaptive.w"], other["similarity.adaptive.w"])
    assert not trained(1, lr=1e4)["similarity.table.table"].any()  # no step improved the loss


def test_a_prior_and_a_bias_are_learned():
    patterns, variant = uniform(50, 12, torch.float32) + 2.0, Mixed(0.3, 0.2, 0.6)  # with a nonzero mean
    index, query = variant.sample(patterns, 20_000)
    torch.testing.assert_close(least_squares_bias(patterns[index], query), variant.shift(patterns), atol=0.05, rtol=0)
    network = Network(patterns[:10].repeat(2, 1), prior=True)
    train(network, Noisy(1.0), 20, 0.1)
    assert network.prior.std() > 0.01


def test_separation_loss_moves_patterns_apart():
    patterns = torch.randn(100, 8) * torch.tensor([3.0] + [0.3] * 7)
    network = NETWORKS["K-Hop"](patterns)
    before = network.modulation.separation_loss(patterns)
    train(network, Noisy(0.1), 100)
    after = network.modulation.separation_loss(patterns)
    assert after < before - 0.5
    even = functional.normalize(torch.randn(100, 8), dim=-1)  # random directions
    assert after.item() == pytest.approx(uniformity_loss(even).item(), abs=0.3)


def test_uniformity_is_the_mean_over_pairs_of_directions():
    points = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    unit = (points / points.norm(dim=-1, keepdim=True)).flatten(0, 1)
    expected = torch.stack([(-2 * torch.pdist(each).square()).exp().mean().log() for each in unit]).reshape(2, 3)
    torch.testing.assert_close(uniformity_loss(points), expected)
    torch.testing.assert_close(uniformity_loss(7 * points), expected)
    assert torch.autograd.gradcheck(uniformity_loss, points)
    assert torch.equal(uniformity_loss(points[..., :1, :]), torch.zeros(2, 3))


def test_the_inverse_temperature_minimizes_the_loss():
    rows = torch.arange(30_000)
    index, scores = torch.randint(6, rows.shape), torch.randn(30_000, 6)
    scores[rows, index] += 3.0  # the log-likelihood ratio of a shift of 3 is 3 times the score
    for factor in (1e-6, 1.0, 1e6):
        assert 2.6 < factor * best_inverse_temperature(factor * scores, index) < 3.3
    scores[rows, index] -= 2.0  # the best factor would be 1
    assert 3.5 < best_inverse_temperature(scores, index) < 4.5  # logits with a deviation of 4
    assert best_inverse_temperature(torch.eye(4), torch.arange(4)) < 100  # a loss without a minimum


def test_a_table_is_interpolated_and_extrapolated():
    similarity = TableSimilarity(torch.tensor([[1.0]])).double()
    with torch.no_grad():
        similarity.table.copy_(torch.randn(KNOTS))
    knots = [
        torch.linspace(-reach, reach, count, dtype=torch.float64)[:, None]
        for reach, count in zip((2, 1), KNOTS, strict=True)
    ]
    torch.testing.assert_close(similarity(*knots), similarity.table)
    middle = [(each[1:] + each[:-1]) / 2 for each in knots]
    mean = functional.avg_pool2d(similarity.table[None], 2, 1)[0]
    torch.testing.assert_close(similarity(*middle), mean)
    ends, above = similarity.table[-2:], torch.full((1, 1), 2.1, dtype=torch.float64)
    torch.testing.assert_close(similarity(above, knots[1]), 2 * ends[1:] - ends[:1])


def test_the_learning_rate_rises_and_decays():
    factors = [warmup_cosine(step, 100) for step in range(101)]
    assert factors[10] == 1
    assert factors[:11] == sorted(factors[:11])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[100] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("and_unfolded", [False, True])
def test_folded_weights_change_one_rank_and_are_restored_even_after_an_exception(and_unfolded):
    similarity = ah.AdaptiveSimilarity(128, blocks=64, debias=True)
    for parameter in similarity.parameters():
        nn.init.normal_(parameter)
    query, key, parameters = torch.randn(5, 128), torch.randn(6, 128), dict(similarity.named_parameters())
    expected = similarity(query, key)
    with suppress(KeyboardInterrupt), folded_weights(nn.Sequential(similarity), and_unfolded):
        torch.testing.assert_close(similarity(query, key), expected, rtol=1e-4, atol=1e-3)
        _, folded, *unfolded = trained = [p for p in similarity.parameters() if p.requires_grad]
        assert len(trained) == 2 + and_unfolded
        similarity(query, key).square().sum().backward()
        assert all(p.grad.abs().sum() > 0 for p in trained)
        before = similarity.w.detach().clone()
        folded.data[..., 1] += 0.5
        change = (fold(similarity.w) - fold(before)).detach()
        torch.testing.assert_close(change, 0.5 * (torch.arange(64) == 1).expand_as(change), rtol=0, atol=1e-4)
        folded.data[..., 1] -= 0.5
        for plain in unfolded:
            plain.data += 1.0
            torch.testing.assert_close(similarity.w - before, torch.full_like(before, 64**2 / (64 * 128)))
            plain.data -= 1.0
        raise KeyboardInterrupt
    torch.testing.assert_close(similarity(query, key), expected, rtol=1e-4, atol=1e-3)
    assert all(p is parameters[name] and p.requires_grad for name, p in similarity.named_parameters())
    similarity.w.requires_grad_(False)
    with folded_weights(similarity):
        assert dict(similarity.named_parameters()).keys() == parameters.keys()
