"""The networks of the paper: retrieval, energies and training by gradients."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import ahop_layers as ah
from ahop_layers.memory.variants import Mixed
from ahop_layers.separation import entmax15, sparsemax
from benchmarks.paper.networks import NETWORKS, Network
from benchmarks.paper.retrieval.accuracy import most_likely, retrieval_accuracy, retrieval_error
from benchmarks.paper.training import train


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
