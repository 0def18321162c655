"""Every bad argument raises AHopError with what was expected and what was got."""

from functools import partial

import pytest
import torch
from torch import nn

import ahop_layers as ah
from ahop_layers import hopfield, separation
from ahop_layers.hopfield.transformer import HopfieldEncoderLayer
from ahop_layers.similarity.options import SimilarityOptions
from tests.samples import Scaled, refuses

x, k, w = torch.randn(3, 8), torch.randn(4, 8), torch.randn(2, 8)
q12, k12, w4 = torch.randn(2, 12), torch.randn(3, 12), torch.randn(2, 4)
FLOAT8 = torch.float8_e4m3fn
NORMALIZED = ah.Blocks(4, normalize=True)
# Functions of arguments that return a call without arguments.
similar = partial(partial, ah.AdaptiveSimilarity)
score12 = partial(partial, ah.adaptive_similarity, q12, k12)


def score(**options):
    return ah.adaptive_similarity(x, k, w, **options)


def option(**options):
    return lambda: SimilarityOptions(**options).make_similarity(8, 2)


BAD_CALLS = {
    "not a tensor": (lambda: ah.footprint([1.0], k), "query must be a tensor, got list"),
    "integers": (lambda: ah.footprint(x, k.long()), "key must have a floating-point dtype, got torch.int64"),
    "one dimension": (lambda: ah.footprint(x[0], k), r"query must have at least 2 dimensions .* got \(8,\)"),
    "different d": (lambda: ah.footprint(x, k[:, :5]), r"got query \(3, 8\) and key \(4, 5\)"),
    "empty d": (lambda: ah.footprint(x[:, :0], k[:, :0]), "a last dimension d >= 1"),
    "batches": (lambda: ah.footprint(x.expand(2, 3, 8), k.expand(5, 4, 8)), r"broadcast .* got \(2,\) and \(5,\)"),
    "unknown base": (lambda: ah.footprint(x, k, "cos"), "base must be one of dis, dot, l1.*got 'cos'"),
    "dtypes": (lambda: ah.adaptive_similarity(x, k.double(), w), "same dtype, got torch.float32 and torch.float64"),
    "devices": (lambda: ah.adaptive_similarity(x, k.to("meta"), w), "one device, got query on cpu, key on meta"),
    "weight device": (lambda: ah.adaptive_similarity(x, k, w.to("meta")), "one device, got query on cpu, weight on"),
    "weight shape": (lambda: ah.adaptive_similarity(x, k, w[:1]), r"\(n_bases, n\) = \(2, n\) .* got \(1, 8\)"),
    "weight dtype": (lambda: ah.adaptive_similarity(x, k, w.long()), "weight must have a floating-point dtype"),
    "heads": (lambda: ah.adaptive_similarity(x.expand(2, 3, 8), k, w.expand(5, 2, 8)), r"\(2,\) and \(\) and \(5,\)"),
    "no base": (lambda: score(bases=()), r"bases must be a tuple or list of base names, got \(\)"),
    "base twice": (lambda: score(bases=("dot", "dot")), r"each base may appear once in bases, got \('dot', 'dot'\)"),
    "float8": (lambda: ah.footprint(x.to(FLOAT8), k), r"query must have dtype float16, .* got torch\.float8_e4m3fn"),
    "cuda on cpu": (lambda: ah.adaptive_similarity(x, k, w, backend="cuda"), "cuda"),
    "dim": (lambda: ah.AdaptiveSimilarity(0), "dim must be an integer of at least 1, got 0"),
    "num_heads": (lambda: ah.AdaptiveSimilarity(8, 2.5), "num_heads must be an integer of at least 1, got 2.5"),
    "init": (lambda: ah.AdaptiveSimilarity(8, init="cos"), "init must be one of dot, dis, l1, uniform.* got 'cos'"),
    "init base": (lambda: ah.AdaptiveSimilarity(8, bases=("l1",)), r"init='dot' needs 'dot' among .* got \('l1',\)"),
    "init shape": (lambda: ah.AdaptiveSimilarity(8, init=torch.ones(8)), r"shape of w, \(2, 8\), got \(8,\)"),
    "init dtype": (lambda: ah.AdaptiveSimilarity(8, init=torch.ones(2, 8).int()), "init must have a floating"),
    "no similarity": (option(similarity=5), r"similarity must be a module or a factory f\(dim, num_heads\), got 5"),
    "factory": (option(similarity=lambda dim, heads: torch.ones(1)), "factory must return a module, got Tensor"),
    "and bases": (option(similarity=Scaled, bases=("dot",)), r"similarity replaces bases, init, .* bases=\('dot',\)"),
    "base name": (lambda: ah.register_base("a,b", torch.mul), "name must be an identifier, got 'a,b'"),
    "base taken": (lambda: ah.register_base("dot", torch.mul), "name must not be registered yet, got 'dot'"),
    "base no function": (lambda: ah.register_base("mine", 3), "function must be callable with two tensors, got int"),
    "blocks of a footprint": (lambda: ah.footprint(q12, k12, blocks=5), "blocks must divide d = 12: .* 6, 12, got 5"),
    "other n": (score12(w4, blocks=6), "blocks must be the n of weight .* 6 blocks and"),
    "other tensor": (score12(w4, blocks=torch.arange(12)), r"the n of weight .* 12 blocks and \(2, 4\)"),
    "tensor on a kernel": (
        score12(w4, blocks=torch.arange(12) // 3, backend="cpu"),
        "a tensor of blocks needs backend='chunked' or 'reference', got backend='cpu'",
    ),
    "divisor": (similar(12, blocks=5), "blocks must divide d = 12: .* 1, 2, 3, 4, 6, 12, got 5"),
    "length": (similar(12, blocks=torch.arange(6)), "each of the 12 dimensions, got 6"),
    "floats": (lambda: ah.Blocks(torch.ones(12)), "blocks must have an integer dtype, got torch.float32"),
    "matrix": (lambda: ah.Blocks(torch.zeros(3, 4, dtype=torch.long)), r"of the 12 dimensions, got shape \(3, 4\)"),
    "meta": (lambda: ah.Blocks(torch.arange(4, device="meta")), "must have an integer dtype and values"),
    "gap": (lambda: ah.Blocks(torch.tensor([0, 2])), "from 0 to n - 1, got the numbers 0, 2"),
    "normalize": (lambda: ah.Blocks(4, normalize=1), "normalize must be True or False, got 1"),
    "single dimensions": (
        similar(12, blocks=ah.Blocks(None, normalize=True)),
        "normalize=True needs blocks of several dimensions, got 12 blocks of 12 dimensions",
    ),
    "other dim": (lambda: similar(24, blocks=4)()(q12, q12), r"last dimension dim = 24, got query \(2, 12\)"),
    "init and blocks": (similar(12, init=torch.ones(2, 12), blocks=4), r"shape of w, \(2, 4\), got"),
    "batches of normalized blocks": (
        lambda: similar(12, blocks=NORMALIZED)()(q12.expand(2, 2, 12), q12.expand(3, 2, 12)),
        "batch dimensions must broadcast",
    ),
    "norms of nothing": (lambda: similar(12)().fix_scales_(None), "must be a tensor, got NoneType"),
    "norms of others": (lambda: similar(6)().fix_scales_(q12), r"dimension dim = 6, got .* key \(2, 12\)"),
    "patches": (lambda: ah.patches(8, 8, 0), "size must be an integer of at least 1, got 0"),
    "widths": (partial(score, bases=("l1", "near"), widths=torch.ones(3)), r"widths must be \(n_bases,\) = \(2,\)"),
    "quantile 0": (similar(4, bases=(("near", 0.0),), init="uniform"), "above 0 and at most 1"),
    "quantile of l1": (similar(4, bases=(("l1", 0.5),), init="uniform"), "base that saturates"),
    "separation": (lambda: ah.Separation("hardmax"), "separation must be one of softmax.*got 'hardmax'"),
    "integer scores": (lambda: separation.softmax(torch.tensor([1, 2])), r"floating-point dtype, got torch\.int64"),
    "embed_dim": (lambda: ah.AdaptiveAttention(10, 3), "embed_dim must be a multiple of num_heads, got 10 and 3"),
    "dropout": (lambda: ah.AdaptiveAttention(12, 3, 1.5), "dropout must be a number between 0 and 1, got 1.5"),
    "activation": (
        lambda: HopfieldEncoderLayer(ah.AdaptiveHopfield(16), activation="nope"),
        "activation must name a function of torch, got 'nope'",
    ),
    "association": (lambda: HopfieldEncoderLayer(nn.Linear(2, 2)), "must be a Hopfield layer .*got Linear"),
    "causal": (
        lambda: HopfieldEncoderLayer(ah.AdaptiveHopfield(16))(torch.randn(1, 2, 16), is_causal=True),
        "is_causal=True describes a mask, got no mask",
    ),
    "parameters": (lambda: ah.similarity_parameters(None), "must be a module, got NoneType"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_argument(name):
    call, message = BAD_CALLS[name]
    refuses(message, call)


HOPFIELD = [
    ({"input_size": None}, "input_size must be given"),
    ({"num_heads": 5}, "multiple of 5 heads, got 12"),
    ({"hidden_size": "4"}, "hidden_size must be an integer of at least 1, got '4'"),
    ({"normalize_stored_pattern": False}, "needs normalize_stored_pattern=True, got False"),
    ({"normalize_hopfield_space_affine": True}, "needs normalize_hopfield_space, got False"),
    ({"scaling": torch.ones(3)}, r"scaling must be a number or have a shape of .*got \(3,\)"),
    ({"pattern_projection_as_connected": True, "stored_pattern_size": 8}, "of one size, got 8 and 12"),
]


@pytest.mark.parametrize(("arguments", "message"), HOPFIELD)
def test_bad_argument_of_a_hopfield_layer(arguments, message):
    refuses(message, hopfield.Hopfield, **{"input_size": 12, **arguments})


def test_it_is_a_value_error():
    assert issubclass(ah.AHopError, ValueError)
