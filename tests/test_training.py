"""Parameter groups of similarities and of all other parameters."""

import pytest
import torch
from torch import nn

import ahop_layers as ah
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
