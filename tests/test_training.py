"""Parameter groups, reparametrized weights and the learning-rate schedule."""

from contextlib import suppress

import pytest
import torch
from torch import nn

import ahop_layers as ah
from ahop_layers.ops.reference import fold
from ahop_layers.training import folded_weights, warmup_cosine
from tests.samples import Scaled


def model(**keywords):
    return nn.Sequential(nn.Linear(4, 8), ah.AdaptiveAttention(8, 2, **keywords), nn.LayerNorm(8))


def ids(parameters):
    return [id(parameter) for parameter in parameters]


@pytest.mark.parametrize("keywords", [{"debias": True}, {"similarity": Scaled}], ids=["adaptive", "other"])
def test_similarity_parameters_have_their_own_group(keywords):
    layers = model(**keywords)
    rest, similarity = ah.parameter_groups(layers, lr=0.1, similarity_lr=0.01, weight_decay=0.5)
    assert ids(similarity["params"]) == ids(layers[1].similarity.parameters())
    assert sorted(ids(rest["params"] + similarity["params"])) == sorted(ids(layers.parameters()))
    assert (rest["lr"], rest["weight_decay"]) == (0.1, 0.5)
    assert (similarity["lr"], similarity["weight_decay"]) == (0.01, 0.0)


def test_similarities_have_the_same_learning_rate_and_no_weight_decay_by_default():
    layers, rate = model(), torch.tensor(0.1)
    assert all(group["lr"] is rate for group in ah.parameter_groups(layers, lr=rate))
    before = [parameter.clone() for parameter in layers.parameters()]
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.SGD(ah.parameter_groups(layers, lr=0.1, weight_decay=0.5)).step()
    similarity = ids(ah.similarity_parameters(layers))
    for parameter, old in zip(layers.parameters(), before, strict=True):
        torch.testing.assert_close(parameter, old if id(parameter) in similarity else 0.95 * old)


def test_a_model_without_similarity_has_one_group_and_a_shared_similarity_is_in_its_group_once():
    layer = nn.Linear(3, 3)
    (group,) = ah.parameter_groups(layer, lr=0.1, similarity_lr=1.0)
    assert ids(group["params"]) == ids(layer.parameters())
    similarity = ah.AdaptiveSimilarity(4, 2)
    layers = nn.Sequential(*(ah.AdaptiveAttention(8, 2, similarity=similarity) for _ in range(2)))
    assert ids(ah.parameter_groups(layers, lr=0.1)[1]["params"]) == ids(similarity.parameters())
    torch.optim.SGD(ah.parameter_groups(layers, lr=0.1))  # refuses a parameter in two groups


def test_a_step_on_a_folded_weight_changes_one_rank_and_frozen_weights_are_not_reparametrized():
    similarity = ah.AdaptiveSimilarity(4, bases=("dot",))
    with folded_weights(similarity):
        (folded,) = (p for p in similarity.parameters() if p.requires_grad)
        before = fold(similarity.w.detach())
        with torch.no_grad():
            folded[..., 1] += 0.5
        torch.testing.assert_close(fold(similarity.w.detach()) - before, torch.tensor([[0.0, 0.5, 0.0, 0.0]]))
    similarity.w.requires_grad_(False)
    with folded_weights(similarity):
        assert dict(similarity.named_parameters()).keys() == {"w", "beta"}


@pytest.mark.parametrize("and_unfolded", [False, True])
@pytest.mark.parametrize(
    "blocks", [None, ah.Blocks(2, normalize=True), torch.tensor([0, 0, 1, 0, 2, 2, 2, 3])], ids=str
)
def test_weights_are_reparametrized_and_restored_even_after_an_exception(blocks, and_unfolded):
    similarity = ah.AdaptiveSimilarity(8, blocks=blocks, debias=True)
    for parameter in similarity.parameters():
        nn.init.normal_(parameter)
    query, key = torch.randn(5, 8), torch.randn(6, 8)
    expected, names = similarity(query, key), list(similarity.state_dict())
    parameters = dict(similarity.named_parameters())
    with suppress(KeyboardInterrupt), folded_weights(nn.Sequential(similarity), and_unfolded=and_unfolded):
        torch.testing.assert_close(similarity(query, key), expected, rtol=1e-4, atol=1e-4)
        trained = [p for p in similarity.parameters() if p.requires_grad]
        assert len(trained) == 2 + and_unfolded
        similarity(query, key).square().sum().backward()
        assert all(p.grad.abs().sum() > 0 for p in trained)
        raise KeyboardInterrupt
    torch.testing.assert_close(similarity(query, key), expected, rtol=1e-4, atol=1e-4)
    assert sorted(similarity.state_dict()) == sorted(names)
    assert all(p is parameters[name] and p.requires_grad for name, p in similarity.named_parameters())


@pytest.mark.parametrize(
    ("dim", "blocks", "scale"),
    [(128, None, 1 / 4), (128, 32, 1.0), (1024, 64, 64 / 1024), (1024, ah.Blocks(128, normalize=True), 1 / 4)],
)
def test_a_step_on_all_weights_changes_a_score_as_much_as_with_64_dimensions(dim, blocks, scale):
    similarity = ah.AdaptiveSimilarity(dim, bases=("dot",), blocks=blocks).double()
    ones = torch.ones(1, dim, dtype=torch.float64)
    with folded_weights(similarity, and_unfolded=True):
        _, plain = (p for p in similarity.parameters() if p.requires_grad)
        before = similarity.w.detach().clone()
        with torch.no_grad():
            plain += 1.0
        torch.testing.assert_close(similarity.w.detach() - before, torch.full_like(before, scale))
        if blocks is None or isinstance(blocks, int):  # the sum of all footprint entries, for similarities of 1
            n = similarity.blocks.count(dim)
            change = similarity(ones, ones).item() - dim
            assert change == pytest.approx(scale * dim * (n + 1) / 2)
            assert change <= 64**2 / 2 * (1 + 1 / n) + 1e-9


@pytest.mark.parametrize("count", [1, 100])
def test_the_learning_rate_rises_and_decays(count):
    factors = [warmup_cosine(step, count) for step in range(count)]
    peak = count // 10
    assert factors[peak] == 1
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert all(0 < factor <= 1 for factor in factors)
    assert warmup_cosine(count, count) == pytest.approx(0, abs=1e-9)
