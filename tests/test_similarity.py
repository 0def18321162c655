"""The module AdaptiveSimilarity."""

import copy
import io
import pickle

import pytest
import torch

import ahop_layers as ah


@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("init", ["dot", "dis"])
@pytest.mark.parametrize("bases", [("dis", "dot"), ("dot", "l1", "dis")])
def test_warm_start_is_the_base_similarity(heads, init, bases):
    similarity = ah.AdaptiveSimilarity(8, heads, bases=bases, init=init, debias=True).double()
    query, key = (torch.randn(2, heads or 1, n, 8, dtype=torch.float64) for n in (4, 5))
    expected = query @ key.mT if init == "dot" else -torch.cdist(query, key).square()
    torch.testing.assert_close(similarity(query, key), expected)


def test_uniform_init_averages_the_footprint():
    similarity = ah.AdaptiveSimilarity(8, bases=("dis",), init="uniform")
    query, key = torch.randn(4, 8), torch.randn(5, 8)
    torch.testing.assert_close(similarity(query, key), ah.footprint(query, key, "dis").mean(-1))


def test_tensor_init_is_taken_over():
    weights = torch.randn(3, 2, 8)
    similarity = ah.AdaptiveSimilarity(8, 3, init=weights)
    assert torch.equal(similarity.w, weights)
    assert torch.equal(similarity.beta, torch.ones(3, 2))
    with torch.no_grad():
        similarity.w.zero_()
    similarity.reset_parameters()
    assert torch.equal(similarity.w, weights)


def test_a_trained_weight_as_init_is_copied():
    trained = ah.AdaptiveSimilarity(4)
    similarity = ah.AdaptiveSimilarity(4, init=trained.w)
    assert list(similarity.state_dict()) == ["w", "beta"]
    assert torch.equal(copy.deepcopy(ah.AdaptiveSimilarity(4, init=2 * trained.w)).w, 2 * trained.w)


def test_every_parameter_has_a_gradient_at_the_warm_start():
    similarity = ah.AdaptiveSimilarity(8, 3, debias=True)
    query, key = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 5, 8)
    similarity(query, key).square().sum().backward()
    assert similarity.beta.grad.abs().min() > 0
    assert similarity.w.grad[:, 1].abs().min() > 0
    assert similarity.bias.grad.abs().min() > 0


def test_repr_gives_the_constructor_back():
    similarity = ah.AdaptiveSimilarity(8, 3, bases=("l1", "dot"), debias=True)
    again = eval(repr(similarity), {"AdaptiveSimilarity": ah.AdaptiveSimilarity})
    assert repr(again) == repr(similarity)


def test_copies_and_checkpoints():
    similarity = ah.AdaptiveSimilarity(8, 3, debias=True)
    with torch.no_grad():
        similarity.w.normal_()
    query, key = torch.randn(3, 4, 8), torch.randn(3, 5, 8)
    buffer = io.BytesIO()
    torch.save(similarity.state_dict(), buffer)
    buffer.seek(0)
    loaded = ah.AdaptiveSimilarity(8, 3, debias=True)
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    for other in (loaded, copy.deepcopy(similarity), pickle.loads(pickle.dumps(similarity))):
        assert torch.equal(other(query, key), similarity(query, key))


def test_a_few_steps_learn_that_half_the_dimensions_are_noise():
    """On masked queries the learned weights beat the distance they start from, on draws they have not seen."""
    patterns = torch.rand(100, 16) * 2 - 1
    similarity = ah.AdaptiveSimilarity(16, init="dis")
    optimizer = torch.optim.Adam(similarity.parameters(), lr=0.1)

    def draw(n):
        index = torch.randint(100, (n,))
        masked = torch.rand(n, 16) < 0.5
        return index, torch.where(masked, torch.rand(n, 16) * 2 - 1, patterns[index])

    def accuracy(index, query):
        return (similarity(query, patterns).argmax(-1) == index).float().mean()

    held_out = draw(500)
    before = accuracy(*held_out)
    for _ in range(60):
        index, query = draw(128)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(similarity(query, patterns), index).backward()
        optimizer.step()
    assert accuracy(*held_out) > before + 0.2
