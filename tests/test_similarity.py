"""AdaptiveSimilarity, and how layers build and find similarities."""

import copy

import pytest
import torch
from torch import nn

import ahop_layers as ah
from ahop_layers.similarity.adaptive import LazyAdaptiveSimilarity, SimilarityOptions, named_similarities
from tests.samples import Scaled


def test_a_trained_weight_as_init_is_copied():
    trained = ah.AdaptiveSimilarity(4)
    similarity = ah.AdaptiveSimilarity(4, init=trained.w)
    assert list(similarity.state_dict()) == ["w", "beta", "_extra_state"]
    assert torch.equal(copy.deepcopy(ah.AdaptiveSimilarity(4, init=2 * trained.w)).w, 2 * trained.w)


def test_device_and_dtype():
    similarity = ah.AdaptiveSimilarity(8, 3, debias=True, device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in similarity.parameters()} == {("meta", torch.float64)}
    similarity = ah.AdaptiveSimilarity(8, init=torch.ones(2, 8), dtype=torch.bfloat16)
    assert (similarity.w.dtype, similarity.beta.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (similarity.w == 1).all()
    with pytest.raises(TypeError, match="positional"):
        ah.AdaptiveSimilarity(8, 3, ("dot",), "dot", False, None, "meta")


def test_a_layer_builds_its_similarity_from_arguments_a_module_or_a_factory():
    options = SimilarityOptions(bases=("dot",), debias=True)
    assert repr(options.make_similarity(8, 2)) == repr(ah.AdaptiveSimilarity(8, 2, ("dot",), debias=True))
    module = Scaled(8, 2)
    assert SimilarityOptions(similarity=module).make_similarity(8, 2) is module
    assert SimilarityOptions(similarity=Scaled).make_similarity(8, 2).shape == (8, 2)
    made = SimilarityOptions(similarity=ah.AdaptiveSimilarity).make_similarity(8, 2)
    assert repr(made) == repr(SimilarityOptions().make_similarity(8, 2))


def test_an_unknown_dimension_is_inferred_or_an_error():
    assert isinstance(SimilarityOptions().make_similarity(None, 2), LazyAdaptiveSimilarity)
    assert SimilarityOptions(init=torch.ones(2, 2, 5)).make_similarity(None, 2).dim == 5
    with pytest.raises(ah.AHopError, match="init must have the shape of w"):
        SimilarityOptions(init=torch.tensor(1.0)).make_similarity(None, 2)
    with pytest.raises(ah.AHopError, match="a similarity factory needs the dimension of a head"):
        SimilarityOptions(similarity=Scaled).make_similarity(None, 2)


def test_similarities_are_found_whatever_their_class():
    attention = ah.AdaptiveAttention(8, 2, similarity=Scaled)
    memory = ah.AssociativeMemory(torch.randn(3, 4), "adaptive")
    model = nn.ModuleDict({"attention": attention, "memory": memory, "alone": ah.AdaptiveSimilarity(4)})
    expected = {"attention.similarity": attention.similarity, "memory.similarity": memory.similarity}
    assert named_similarities(model) == {**expected, "alone": model["alone"]}
    assert named_similarities(attention.similarity) == {}  # a module of another class is one only inside its layer
    assert ah.similarity_parameters(model)[0] is attention.similarity.scale
    attention.similarity = None
    assert list(named_similarities(model)) == ["memory.similarity", "alone"]
