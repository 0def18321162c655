"""Separations: known values, gradients, masks, groups, compile."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ahop_layers import separation as sep
from ahop_layers.packed import Bags


@pytest.mark.parametrize("name", [name for name in sep.SEPARATIONS if name != "argmax"])  # by design that of softmax
def test_float64_gradients(name):
    scores = 2 * torch.randn(4, 7, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(sep.Separation(name).double(), scores)
    if name == "entmax":
        alpha = torch.tensor([[1.2], [1.5], [1.7], [1.9]], dtype=torch.double, requires_grad=True)
        assert torch.autograd.gradcheck(sep.entmax, (scores, alpha))


def test_entmax_includes_entmax15_sparsemax_and_softmax():
    scores = 3 * torch.randn(5, 9, dtype=torch.double)
    for alpha, relative in ((1.5, sep.entmax15), (2.0, sep.sparsemax)):
        torch.testing.assert_close(sep.entmax(scores, torch.tensor(alpha, dtype=torch.double)), relative(scores))
    near_one = sep.entmax(scores, torch.tensor(1.0001, dtype=torch.double))
    torch.testing.assert_close(near_one, scores.softmax(-1), atol=1e-3, rtol=0)


def test_against_the_entmax_package():
    entmax = pytest.importorskip("entmax", reason="the entmax package is not installed")
    scores = 3 * torch.randn(6, 20)
    torch.testing.assert_close(sep.sparsemax(scores), entmax.sparsemax(scores))
    torch.testing.assert_close(sep.entmax15(scores), entmax.entmax15(scores))
    alpha = torch.full((6, 1), 1.3)
    torch.testing.assert_close(sep.entmax(scores, alpha), entmax.entmax_bisect(scores, alpha), atol=1e-5, rtol=1e-4)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.integers(1, 30), name=st.sampled_from(sep.SEPARATIONS))
def test_masked_equals_shorter(seed, size, name):
    generator = torch.Generator().manual_seed(seed)
    scores, keep = torch.randn(3, size, generator=generator), torch.rand(size, generator=generator) < 0.6
    keep[0] = True
    module = sep.Separation(name)
    weights = module(scores.masked_fill(~keep, -torch.inf))
    torch.testing.assert_close(weights[:, keep], module(scores[:, keep]))
    assert (weights[:, ~keep] == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(3))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(any),
    name=st.sampled_from(sep.SEPARATIONS),
)
def test_groups_equal_rows(seed, sizes, name):
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(sum(sizes), 2, 3, generator=generator, dtype=torch.double)
    module, bags = sep.Separation(name, num_heads=2).double(), Bags(sizes, scores.device)
    cotangent, results = torch.randn(scores.shape, generator=generator, dtype=torch.double), []
    for separate in (
        lambda scores: module(scores, groups=bags),
        lambda scores: torch.cat([module(part.permute(1, 2, 0)).permute(2, 0, 1) for part in scores.split(sizes)]),
    ):
        given_scores = scores.clone().requires_grad_()
        module.zero_grad()
        weights = separate(given_scores)
        weights.backward(cotangent)
        grads = [parameter.grad for parameter in module.parameters()]
        results.append([weights.detach(), given_scores.grad, *grads])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_argmax_of_a_group_selects_one_of_equal_scores():
    scores = torch.tensor([1.0, 1.0, 0.0, 2.0, 2.0, 2.0])[:, None, None]
    weights = sep.Separation("argmax")(scores, groups=Bags([3, 0, 3], scores.device))
    assert weights.flatten().tolist() == [1, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("name", sep.SEPARATIONS)
def test_a_fully_masked_row_gets_zeros_and_finite_gradients(name):
    scores = torch.randn(3, 4)
    scores[1], scores[2, 1:] = -torch.inf, -torch.inf
    scores.requires_grad_()
    module = sep.Separation(name)
    weights = module(scores)
    assert (weights[1] == 0).all()
    (weights * torch.randn(3, 4)).sum().backward()
    assert all(p.grad.isfinite().all() for p in (scores, *module.parameters()))
    assert (scores.grad[1] == 0).all()


@pytest.mark.parametrize("name", ["softmax", "sparsemax", "entmax15", "entmax"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_non_finite_score_affects_its_row_only(name, bad):
    scores = torch.randn(3, 5)
    good = sep.Separation(name)(scores)
    scores[1, 2] = bad
    weights = sep.Separation(name)(scores)
    assert weights[1].isnan().any()
    torch.testing.assert_close(weights[[0, 2]], good[[0, 2]])


def test_argmax_is_hard_with_the_gradient_of_softmax():
    scores = torch.randn(3, 5, requires_grad=True)
    weights, cotangent = sep.argmax(scores), torch.randn(3, 5)
    torch.testing.assert_close(weights, torch.nn.functional.one_hot(scores.argmax(-1), 5).float(), atol=0, rtol=0)
    (hard,) = torch.autograd.grad(weights, scores, cotangent)
    (soft,) = torch.autograd.grad(scores.softmax(-1), scores, cotangent)
    torch.testing.assert_close(hard, soft)


@pytest.mark.parametrize("name", sep.SEPARATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_dtype_is_kept_and_rows_may_be_empty(name, dtype):
    module = sep.Separation(name).to(dtype)
    assert module(torch.randn(2, 5).to(dtype)).dtype == dtype
    assert module(torch.randn(2, 0).to(dtype)).shape == (2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "entmax", "argmax"])
def test_one_graph(name):
    module, scores = sep.Separation(name), torch.randn(3, 6, requires_grad=True)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(scores), module(scores))


def test_alpha_per_head_can_be_trained_and_reset():
    module, scores = sep.Separation("entmax", num_heads=2), torch.randn(3, 2, 4, 5)
    assert module.alpha_logit.shape == (2, 1, 1)
    torch.testing.assert_close(module(scores), sep.entmax15(scores))
    module(scores).square().sum().backward()
    assert (module.alpha_logit.grad != 0).all()
    torch.nn.init.ones_(module.alpha_logit)
    module.reset_parameters()
    assert (module.alpha_logit == 0).all()
