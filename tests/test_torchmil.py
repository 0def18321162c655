"""AdaptivePool: the interface and masks of torchmil, and training inside its ABMIL."""

import inspect

import pytest
import torch
from frameworks import make_torchvision_importable
from torch.nn.utils.rnn import pad_sequence

from ahop_layers import AdaptiveSimilarity, AHopError, Blocks, similarity_parameters
from ahop_layers.torchmil import AdaptivePool

pytestmark = pytest.mark.slow


@pytest.fixture
def torchmil():
    make_torchvision_importable()  # adds the folder of packages installed without their dependencies
    reason = "torchmil is not installed (pip install --no-deps torchmil tensordict pyvers)"
    pytest.importorskip("torchmil.models", reason=reason, exc_type=ImportError)
    import torchmil.models
    import torchmil.nn

    return torchmil


def some_bags(sizes=(4, 1, 6)):
    bags = [torch.randn(size, 8) for size in sizes]
    padded = pad_sequence(bags, batch_first=True, padding_value=99.0)
    mask = (torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]).to(torch.uint8)
    return bags, padded, mask


BLOCKS = {"tensor": torch.tensor([0, 1, 1, 2, 0, 0, 2, 2]), "several": [None, Blocks(2, normalize=True)]}


@pytest.mark.parametrize(("blocks", "separation"), [(BLOCKS["tensor"], "softmax"), (2, "sparsemax")])
def test_masked_equals_shorter(blocks, separation):
    pool = AdaptivePool(8, att_dim=16, num_heads=2, blocks=blocks, bases=("dot", "l1"), separation=separation)
    similarity = pool.pooling.hopfield.association_core.similarity
    assert repr(similarity) == repr(AdaptiveSimilarity(8, 2, bases=("dot", "l1"), blocks=blocks))
    with torch.no_grad():
        for parameter in similarity.parameters():
            parameter.normal_()
        for name, norm in similarity.named_buffers():
            if name.startswith("norm"):
                norm.fill_(1.0)  # fixed, so that a score does not depend on the other instances
    bags, padded, mask = some_bags()
    pooled, att = pool(padded, mask, return_att=True)
    for number, bag in enumerate(bags):
        alone, att_alone = pool(bag[None], return_att=True)
        torch.testing.assert_close(pooled[number], alone[0])
        torch.testing.assert_close(att[number, : len(bag)], att_alone[0])


def test_a_mask_of_any_dtype_and_attention_values_that_a_softmax_normalizes():
    pool = AdaptivePool(8, att_dim=8, num_heads=2)
    bags, padded, mask = some_bags()
    pooled, att = pool(padded, mask, return_att=True)
    for dtype in (torch.bool, torch.float32, torch.int64):
        assert torch.equal(pool(padded, mask.to(dtype)), pooled)
    assert not torch.allclose(pool(padded, 1 - mask), pooled)
    weights = att.masked_fill(mask == 0, -torch.inf).softmax(1)
    expected = pool.pooling.pool_packed(torch.cat(bags), [4, 1, 6], return_association=True)[1].mean((1, 2))
    torch.testing.assert_close(weights[mask != 0], expected)


def test_small_weights_of_a_large_bag_in_half_precision():
    """The mean weight, 2^-15, is below the smallest normal number of float16."""
    pool, bag = AdaptivePool(8, att_dim=8).half(), torch.randn(1, 2**15, 8).half()
    att = pool(bag, return_att=True)[1]
    weights = pool.pooling.pool_packed(bag[0], [2**15], return_association=True)[1].flatten()
    torch.testing.assert_close(att[0].float().exp(), weights.float(), rtol=0.02, atol=0)


def test_an_empty_bag_has_an_output_and_gradients():
    pool = AdaptivePool(8, att_dim=8)
    bags = torch.randn(2, 3, 8, requires_grad=True)
    pooled = pool(bags, torch.tensor([[1, 1, 1], [0, 0, 0]]))
    torch.testing.assert_close(pooled[1], pool.pooling.hopfield.association_core.out_proj.bias)
    pooled.sum().backward()
    assert bags.grad[0].abs().sum() > 0
    assert bags.grad[1].abs().sum() == 0


@pytest.mark.parametrize(("call", "message"), [
    (lambda: AdaptivePool(8, att_dim=10, num_heads=4), "multiple of num_heads.*got 10 and 4"),
    (lambda: AdaptivePool(8, quantity=2), "quantity is fixed.*got quantity=2"),
    (lambda: AdaptivePool(8)(torch.randn(2, 3, 7)), r"in_dim = 8, got \(2, 3, 7\)"),
    (lambda: AdaptivePool(8)(torch.randn(2, 3, 8), torch.ones(2, 4)), r"\(2, 3\) or None, got \(2, 4\)"),
    (lambda: AdaptivePool(8)(torch.randn(2, 3, 8), [[1, 1, 0]]), "mask must be a tensor .* got list"),
    (lambda: AdaptivePool(8)(None), "X must be a tensor, got NoneType"),
])  # fmt: skip
def test_errors(call, message):
    with pytest.raises(AHopError, match=message):
        call()


def test_the_interface_is_that_of_torchmil(torchmil):
    theirs, ours = (inspect.signature(each.forward) for each in (torchmil.nn.AttentionPool, AdaptivePool))
    assert [(each.name, each.default) for each in ours.parameters.values()] == [
        (each.name, each.default) for each in theirs.parameters.values()
    ]
    _, padded, mask = some_bags()
    their_results = torchmil.nn.AttentionPool(8, 16)(padded, mask, return_att=True)
    our_results = AdaptivePool(8, 16)(padded, mask, return_att=True)
    assert [each.shape for each in our_results] == [each.shape for each in their_results]
    weights = torchmil.nn.masked_softmax(our_results[1][..., None], mask[..., None])
    torch.testing.assert_close(weights.sum(1), torch.ones(3, 1))
    assert weights[mask == 0].abs().max() < 1e-6


def test_it_trains_in_an_abmil(torchmil):
    model = torchmil.models.ABMIL(in_shape=(8,), att_dim=16)
    model.pool = AdaptivePool(8, att_dim=16, num_heads=2, blocks=Blocks(2, normalize=True), init="uniform")
    _, padded, mask = some_bags()
    before = [parameter.clone() for parameter in similarity_parameters(model)]
    assert len(before) == 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        losses.append(sum(model.compute_loss(torch.tensor([0.0, 1.0, 1.0]), padded, mask)[1].values()))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[1] < losses[0]
    assert not any(torch.equal(*pair) for pair in zip(similarity_parameters(model), before, strict=True))
    logits, att = model.predict(padded, mask)
    assert (logits.shape, att.shape) == ((3,), mask.shape)
