"""Every bad argument raises AHopError with what was expected and what was got."""

import numpy as np
import pytest
import torch

import ahop_layers as ah

x, k, w = torch.randn(3, 8), torch.randn(4, 8), torch.randn(2, 8)
FLOAT8 = torch.float8_e4m3fn


def score(**options):
    return ah.adaptive_similarity(x, k, w, **options)


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
    "weight rank": (lambda: ah.adaptive_similarity(x, k, w[0]), r"got \(8,\)"),
    "weight dtype": (lambda: ah.adaptive_similarity(x, k, w.long()), "weight must have a floating-point dtype"),
    "heads": (lambda: ah.adaptive_similarity(x.expand(2, 3, 8), k, w.expand(5, 2, 8)), r"\(2,\) and \(\) and \(5,\)"),
    "no base": (lambda: score(bases=()), r"bases must be a tuple or list of base names, got \(\)"),
    "bases in an array": (lambda: score(bases=np.array(["dis"])), "bases must be a tuple or list .* got array"),
    "bases in a list in a list": (lambda: score(bases=[["dis"]]), r"bases must be names out of .* got \[\['dis'"),
    "base twice": (lambda: score(bases=("dot", "dot")), r"each base may appear once in bases, got \('dot', 'dot'\)"),
    "list as a backend": (lambda: score(backend=["cpu"]), r"backend must be one of .* got \['cpu'"),
    "float8": (lambda: ah.footprint(x.to(FLOAT8), k), r"query must have dtype float16, .* got torch\.float8_e4m3fn"),
    "float8 weight": (lambda: ah.adaptive_similarity(x, k, w.to(FLOAT8)), "weight must have dtype float16, "),
    "backend": (lambda: ah.adaptive_similarity(x, k, w, backend="gpu"), "backend must be one of auto, .* got 'gpu'"),
    "triton on cpu": (lambda: ah.adaptive_similarity(x, k, w, backend="triton"), "triton"),
    "dim": (lambda: ah.AdaptiveSimilarity(0), "dim must be an integer of at least 1, got 0"),
    "num_heads": (lambda: ah.AdaptiveSimilarity(8, 2.5), "num_heads must be an integer of at least 1, got 2.5"),
    "init": (lambda: ah.AdaptiveSimilarity(8, init="cos"), "init must be one of dot, dis, l1, uniform.* got 'cos'"),
    "init base": (lambda: ah.AdaptiveSimilarity(8, bases=("l1",)), r"init='dot' needs 'dot' among .* got \('l1',\)"),
    "init shape": (lambda: ah.AdaptiveSimilarity(8, init=torch.ones(8)), r"shape of w, \(2, 8\), got \(8,\)"),
    "init dtype": (lambda: ah.AdaptiveSimilarity(8, init=torch.ones(2, 8).int()), "init must have a floating"),
    "base name": (lambda: ah.register_base("a,b", torch.mul), "name must be an identifier, got 'a,b'"),
    "base taken": (lambda: ah.register_base("dot", torch.mul), "name must not be registered yet, got 'dot'"),
    "base no function": (lambda: ah.register_base("mine", 3), "function must be callable with two tensors, got int"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_argument(name):
    call, message = BAD_CALLS[name]
    with pytest.raises(ah.AHopError, match=message):
        call()


def test_it_is_a_value_error():
    assert issubclass(ah.AHopError, ValueError)
