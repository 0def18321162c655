"""associate on padded batches, without layers."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from ahop_layers import AdaptiveSimilarity
from ahop_layers.association import Mask, Padded, associate, combine_masks
from ahop_layers.separation import Separation
from tests.samples import refuses

N, H, L, S, D, E = 2, 3, 4, 5, 6, 7


def tensors(dtype=torch.float32):
    return tuple(torch.randn(N, H, rows, size, dtype=dtype) for rows, size in ((L, D), (S, D), (S, E)))


def test_equals_attention_with_both_masks():
    query, key, value = tensors()
    padding = torch.tensor([[False, False, False, True, True], [False, True, False, False, True]])
    added = torch.randn(N * H, L, S)
    mask = combine_masks(padding, added, (N, H, L, S))
    output, weights = associate(query, Padded(key, value, mask), separation=Separation(), scaling=D**-0.5)
    bias = added.view(N, H, L, S).masked_fill(padding[:, None, None], -torch.inf)
    torch.testing.assert_close(output, scaled_dot_product_attention(query, key, value, attn_mask=bias))
    torch.testing.assert_close(weights.sum(-1), torch.ones(N, H, L))


def test_float64_gradients_through_steps_and_masks():
    query, key, value = (x[:1, :1].detach().requires_grad_() for x in tensors(torch.double))
    blocked = torch.zeros(1, 1, L, S, dtype=torch.bool)
    blocked[..., 1], blocked[0, 0, 2] = True, True

    def read(query, key, value):
        mask = Mask(blocked)
        return associate(query, Padded(key, value, mask), separation=Separation("sparsemax"), steps=2, eps=0.0)[0]

    assert torch.autograd.gradcheck(read, (query, key, value))


@pytest.mark.parametrize("steps", [0, 1, 3, None, -1, [0, 2, -1]])
def test_each_step_reads_the_next_state_from_the_keys(steps):
    query, key, value = tensors()
    _, weights = associate(query, Padded(key, value), separation=Separation(), steps=steps, eps=1e-6)
    limits = steps if isinstance(steps, list) else [steps] * H
    for head, limit in enumerate(limits):
        state = query[:, head]
        for _ in range(300 if limit is None or limit < 0 else limit):
            state = (state @ key[:, head].mT).softmax(-1) @ key[:, head]
        torch.testing.assert_close(weights[:, head], (state @ key[:, head].mT).softmax(-1), atol=1e-3, rtol=1e-3)


def test_a_head_stops_when_its_weights_converge():
    query, key, value = tensors()
    eps = torch.tensor([1e9, 1e9, 0.0])
    (_, once), (_, stopped) = (
        associate(query, Padded(key, value), separation=Separation(), **options)
        for options in ({"steps": 1}, {"steps": 9, "eps": eps})
    )
    torch.testing.assert_close(stopped[:, :2], once[:, :2])
    assert not torch.allclose(stopped[:, 2], once[:, 2])


def test_a_search_that_cycles_ends_after_the_maximal_number_of_steps(monkeypatch):
    monkeypatch.setattr("ahop_layers.association.MAX_SEARCH_STEPS", 7)
    calls = []

    def swap(query, key):
        calls.append(1)
        return -query @ key.mT  # argmax then alternates between the two opposite patterns

    key = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])[None, None]
    associate(key[:, :, :1], Padded(key, key), score=swap, separation=Separation("argmax"), steps=None)
    assert len(calls) == 8


def test_a_shared_query_broadcasts():
    query, key, value = tensors()
    shared, _ = associate(query[:1], Padded(key, value), separation=Separation(), steps=2)
    repeated, _ = associate(query[:1].expand(N, -1, -1, -1), Padded(key, value), separation=Separation(), steps=2)
    torch.testing.assert_close(shared, repeated)


@pytest.mark.parametrize("masked_by", ["padding", "bool", "float"])
@pytest.mark.parametrize("separation", ["softmax", "entmax"])
def test_a_fully_masked_query_reads_zeros(masked_by, separation):
    query, key, value = (x.requires_grad_() for x in tensors())
    padding, association = None, (torch.arange(L) == 0)[:, None].expand(L, S)
    if masked_by == "padding":
        padding, association = torch.tensor([[True] * S, [False] * S]), None
    elif masked_by == "float":
        association = torch.zeros(L, S).masked_fill(association, -torch.inf)
    mask, similarity = combine_masks(padding, association, (N, H, L, S)), AdaptiveSimilarity(D, H)
    output, _ = associate(query, Padded(key, value, mask), score=similarity, separation=Separation(separation), steps=1)
    assert not (output[0] if masked_by == "padding" else output[:, :, 0]).any()
    output.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (query, key, value, *similarity.parameters()))


def test_wrong_masks_raise():
    shape = (N, H, L, S)
    sizes = r"\(L, S\) = \(4, 5\) or \(N \* heads, L, S\) = \(6, 4, 5\)"
    for padding, association, message in (
        (torch.zeros(S, N, dtype=torch.bool), None, r"must be \(N, S\) = \(2, 5\), got \(5, 2\)"),
        (None, torch.zeros(N, L, S), sizes + r", got \(2, 4, 5\)"),
        (torch.zeros(N, S, dtype=torch.int), None, "padding_mask must have dtype bool or .* got torch.int32"),
        (None, torch.zeros(L, S, dtype=torch.long), "association_mask must have dtype bool or .* got torch.int64"),
        (5, None, "stored_pattern_padding_mask must be a tensor or None, got int"),
        (None, [[True]], "association_mask must be a tensor or None, got list"),
    ):
        refuses(message, combine_masks, padding, association, shape)
    assert combine_masks(None, None, shape) is None


BLOCKED = torch.rand(2, 1, 4, 5, generator=torch.Generator().manual_seed(0)) < 0.4
BLOCKED[0, 0, 2] = True
ADDED = torch.randn(1, 3, 4, 5, generator=torch.Generator().manual_seed(0))
MASKS = {
    "none": None,
    "padding": Mask(torch.tensor([[False] * 5, [True] * 5])[:, None, None]),
    "blocked": Mask(BLOCKED),
    "added": Mask(added=ADDED),
    "both": Mask(BLOCKED, ADDED),
    "infinite": Mask(added=ADDED.masked_fill(BLOCKED, -torch.inf)),
    "causal": Mask(causal=True),
    "all": Mask(BLOCKED, ADDED, causal=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaling", [1, 0.3, torch.rand(H, 1, 1)], ids=["1", "0.3", "of each head"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_without_weights_a_fused_operator_computes_the_same(mask, scaling, dtype):
    """Also where samples share the queries, and heads the keys."""
    generator = torch.Generator().manual_seed(1)
    shapes = (1, H, L, D), (N, 1, S, D), (N, 1, S, E)
    inputs = [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]
    results = []
    for kind, need_weights in ((torch.float64, True), (dtype, True), (dtype, False)):
        query, key, value = (each.to(kind, copy=True).requires_grad_() for each in inputs)
        output, _ = associate(
            query, Padded(key, value, mask), separation=Separation(), scaling=scaling, need_weights=need_weights
        )
        results.append((output, *torch.autograd.grad(output.double().square().sum(), (query, key, value))))
    for exact, low, found in zip(*results, strict=True):
        error, bound = ((each.double() - exact.double()).abs().max() for each in (found, low))
        assert found.dtype == dtype
        rounding = (64 if dtype == torch.float64 else 4) * torch.finfo(dtype).eps  # in float64, ``low`` is exact
        assert error <= 2 * bound + rounding * exact.abs().max()


def test_the_fused_operator_drops_weights_only_on_a_gpu_and_is_not_used_where_it_is_observed(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "torch.nn.functional.scaled_dot_product_attention",
        lambda *args, **options: calls.append(args) or scaled_dot_product_attention(*args, **options),
    )
    query, key, value = tensors()
    seen, hooked = [], Separation()
    hooked.register_forward_hook(lambda module, args, output: seen.append(output))
    for separation, options in (
        (hooked, {}), (Separation("entmax15"), {}), (Separation(), {"steps": 1}), (Separation(), {"dropout": 0.5}),
    ):  # fmt: skip
        associate(query, Padded(key, value), separation=separation, need_weights=False, **options)
    assert len(seen) == 1
    assert not calls
    associate(query, Padded(key, value), separation=Separation(), need_weights=False)
    assert len(calls) == 1
