"""AdaptiveSimilarity: blocks, initial values, checkpoints; how layers build and find similarities."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import ahop_layers as ah
from ahop_layers.ops import reference
from ahop_layers.similarity.associator import named_similarities
from ahop_layers.similarity.options import LazyAdaptiveSimilarity, SimilarityOptions
from ahop_layers.similarity.protocol import OwnSimilarity, is_solvable
from ahop_layers.similarity.widths import quantiles, units
from tests.samples import Scaled, refuses

BASES = ("dis", "dot", "l1")
UNEQUAL = torch.tensor([2, 0, 1, 0, 2, 2, 1, 3, 0, 3, 3, 3])
PERMUTED = torch.tensor([2, 0, 1, 3, 2, 2, 1, 3, 0, 1, 0, 3])
NORMALIZED = ah.Blocks(UNEQUAL, normalize=True)
EVERY = [None, 1, 3, 12, UNEQUAL, PERMUTED, ah.Blocks(3, normalize=True), NORMALIZED]
NAMES = ["none", "1", "3", "d", "unequal", "permuted", "normalized", "normalized unequal"]
every_kind = pytest.mark.parametrize("blocks", EVERY, ids=NAMES)


def pair(*batch, d=12, dtype=torch.float64, length=4, count=5):
    return torch.randn(*batch, length, d, dtype=dtype), torch.randn(*batch, count, d, dtype=dtype)


def randomized(similarity):
    for parameter in similarity.parameters():
        nn.init.normal_(parameter)
    return similarity


def centered(rows, numbers):
    """The centered values and the norm of each block."""
    for block in range(int(numbers.max()) + 1):
        part = rows[..., numbers == block] - rows[..., numbers == block].mean(-1, keepdim=True)
        yield numbers == block, part, part.norm(dim=-1, keepdim=True)


def normalized_by_hand(rows, numbers, constant):
    result = torch.zeros_like(rows)
    for block, part, norm in centered(rows, numbers):
        result[..., block] = part / (norm + constant)
    return result


def root_mean_square_norm(key, numbers):
    return torch.cat([norm for *_, norm in centered(key, numbers)], -1).square().mean((-2, -1), keepdim=True).sqrt()


def by_hand(similarity, query, key):
    """The scores by the public function on normalized rows, with block numbers."""
    numbers, pair = similarity.blocks.numbers(12), (query, key)
    if similarity.blocks.normalize:
        constant = 1e-3 * root_mean_square_norm(key, numbers)
        pair = (normalized_by_hand(rows, numbers, constant) for rows in pair)
    return ah.adaptive_similarity(*pair, similarity.footprint_weight(), similarity.names, numbers)


@every_kind
def test_scores_equal_the_definition(blocks):
    for heads in (None, 3):
        similarity = randomized(ah.AdaptiveSimilarity(12, heads, BASES, blocks=blocks, debias=True).double())
        query, key = pair(2, *([] if heads is None else [heads]))
        torch.testing.assert_close(similarity(query, key), by_hand(similarity, similarity.unbiased(query), key))


@pytest.mark.parametrize("init", ["dot", "dis", "l1"])
@pytest.mark.parametrize("blocks", [None, 3, UNEQUAL], ids=str)
def test_exact_warm_start(init, blocks):
    query, key = pair(2, 3)
    similarity = ah.AdaptiveSimilarity(12, 3, BASES, init, blocks=blocks, debias=True).double()
    difference = query.unsqueeze(-2) - key.unsqueeze(-3)
    exact = {"dot": query @ key.mT, "dis": -difference.square().sum(-1), "l1": -difference.abs().sum(-1)}[init]
    torch.testing.assert_close(similarity(query, key), exact)
    grads = torch.autograd.grad(similarity(query, key).square().sum(), list(similarity.parameters()))
    (beta,) = [grad for (name, _), grad in zip(similarity.named_parameters(), grads, strict=True) if name == "beta"]
    assert beta.abs().min() > 0  # every base can be learned


def test_initial_values():
    uniform = ah.AdaptiveSimilarity(12, init="uniform", blocks=4)
    assert torch.equal(uniform.w, torch.full((2, 4), 1 / 4))
    assert torch.equal(uniform.beta, torch.ones(2))
    weights = torch.randn(2, 4)
    given, expected = ah.AdaptiveSimilarity(12, init=weights, blocks=4), weights.clone()
    randomized(given)
    weights.zero_()
    given.reset_parameters()
    assert torch.equal(given.w, expected)


@pytest.fixture(scope="module")
def agreement():
    """The name of a registered base."""
    ah.register_base("agreement", lambda query, key: torch.exp(-((query - key) ** 2)))
    yield "agreement"
    del reference.BASES["agreement"]


@pytest.mark.parametrize(("base", "power"), [("agreement", 2), ("near", 1)])
@pytest.mark.parametrize("blocks", [UNEQUAL, ah.Blocks(UNEQUAL, normalize=True)], ids=str)
def test_a_base_that_is_not_zero_for_zeros_never_sees_padding(base, power, blocks, agreement):
    """These bases are 1 for a pair of zeros, so that zero padding would count."""
    initial = ah.AdaptiveSimilarity(12, bases=("dot", base), init=base, blocks=UNEQUAL).double()
    query, key = (rows.requires_grad_() for rows in pair(2, length=2, count=3))
    exact = torch.exp(-((query.unsqueeze(-2) - key.unsqueeze(-3)).abs() ** power)).sum(-1)
    torch.testing.assert_close(initial(query, key), exact)
    similarity = randomized(ah.AdaptiveSimilarity(12, bases=("dot", base), blocks=blocks).double())
    torch.testing.assert_close(similarity(query, key), by_hand(similarity, query, key))
    assert torch.autograd.gradcheck(similarity, (query, key))


def test_built_in_bases_do_not_take_the_reference_path(monkeypatch):
    monkeypatch.setattr(reference, "adaptive_similarity", lambda *_: pytest.fail("took the reference path"))
    for blocks in EVERY:
        ah.AdaptiveSimilarity(12, blocks=blocks)(*pair(2, dtype=torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [pytest.param(3, marks=pytest.mark.full), NORMALIZED], ids=str)
def test_gradcheck(blocks):
    similarity = randomized(ah.AdaptiveSimilarity(12, 2, BASES, blocks=blocks, debias=True).double())
    inputs = [rows.requires_grad_() for rows in pair(2, length=1, count=2)]
    names = [name for name, _ in similarity.named_parameters()]

    def score(query, key, *values):
        return torch.func.functional_call(similarity, dict(zip(names, values, strict=True)), (query, key))

    assert torch.autograd.gradcheck(score, (*inputs, *similarity.parameters()))


def test_units_of_normalized_blocks_do_not_matter_and_dot_is_their_correlation():
    similarity = ah.AdaptiveSimilarity(12, bases=BASES, blocks=ah.Blocks(4, normalize=True)).double()
    query, key = pair(2, 3)
    for unit in (1e-6, 1e6):
        torch.testing.assert_close(similarity(unit * query, unit * key), similarity(query, key))
    whole = ah.AdaptiveSimilarity(12, blocks=ah.Blocks(1, normalize=True)).double()
    correlation = torch.corrcoef(torch.cat([query[0, 0, :1], key[0, 0, :1]]))[0, 1]
    torch.testing.assert_close(whole(query[0, 0, :1], key[0, 0, :1]).squeeze(), correlation, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("blocks", [4, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("zero", ["one block", "queries", "all"])
def test_normalized_blocks_are_finite_where_blocks_are_constant(blocks, zero):
    similarity = ah.AdaptiveSimilarity(12, bases=BASES, blocks=ah.Blocks(blocks, normalize=True)).double()
    query, key = pair()
    query[:, : 3 if zero == "one block" else 12] = 3.0
    if zero == "all":
        key = torch.zeros_like(key)
    inputs = (query.requires_grad_(), key.requires_grad_(), *similarity.parameters())
    scores = similarity(*inputs[:2])
    assert scores.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(scores.square().sum(), inputs))
    assert similarity(query, key[:0]).shape == (4, 0)
    assert similarity(query[:0], key).shape == (0, 5)


@pytest.mark.parametrize("blocks", [NORMALIZED, ah.Blocks(2, normalize=True)], ids=str)
def test_fixed_norms_make_scores_independent_of_other_keys(blocks):
    similarity = randomized(ah.AdaptiveSimilarity(12, blocks=blocks).double())
    query, key = pair(count=40)
    expected = similarity(query, key)
    parts = torch.cat([similarity(query, part) for part in key.split(7)], -1)
    assert not torch.allclose(parts, expected, rtol=1e-7)
    assert similarity.fix_scales_(key) is similarity
    torch.testing.assert_close(similarity.norm, root_mean_square_norm(key, blocks.numbers(12)).squeeze())
    torch.testing.assert_close(similarity(query, key), expected)
    torch.testing.assert_close(torch.cat([similarity(query, part) for part in key.split(7)], -1), expected)
    assert "norm" in similarity.state_dict()
    similarity.reset_parameters()
    assert not similarity.norm.any()


def test_a_batch_entry_is_normalized_by_its_own_keys():
    similarity = ah.AdaptiveSimilarity(12, blocks=ah.Blocks(4, normalize=True)).double()
    query, key = pair(3, 2)
    key[1] *= 1000
    each = torch.stack([similarity(*rows) for rows in zip(query, key, strict=True)])
    torch.testing.assert_close(similarity(query, key), each)
    torch.testing.assert_close(similarity(query, key[0]), similarity(query, key[:1]))  # batches broadcast
    torch.testing.assert_close(similarity(query[0], key), similarity(query[:1], key))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("blocks", [3, NORMALIZED], ids=str)
def test_half_precision(blocks, dtype):
    similarity = ah.AdaptiveSimilarity(12, blocks=blocks).to(dtype)
    query, key = pair(2, dtype=dtype)
    scores = similarity(query, key)
    exact = copy.deepcopy(similarity).double()(query.double(), key.double())
    assert scores.dtype == dtype
    # Two roundings of the normalized rows and one of the score.
    assert (scores.double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps * max(1, exact.abs().max())
    with torch.autocast("cpu", torch.bfloat16):
        assert similarity(query, key).dtype == torch.float32


@every_kind
def test_copies_checkpoints_and_reset(blocks):
    def make(device="cpu"):
        return ah.AdaptiveSimilarity(12, 3, debias=True, blocks=blocks, device=device)

    similarity, buffer = randomized(make()), io.BytesIO()
    query, key = pair(3, dtype=torch.float32)
    similarity.fix_scales_(key)
    torch.save(similarity.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    fresh, empty, assigned = make(), make("meta").to_empty(device="cpu"), make("meta")
    for other in (fresh, empty):
        other.load_state_dict(state)
    assigned.load_state_dict(state, assign=True)
    for other in (fresh, empty, assigned, copy.deepcopy(similarity), pickle.loads(pickle.dumps(similarity))):
        assert torch.equal(other(query, key), similarity(query, key))
        assert repr(other) == repr(similarity)
    reset = make("meta").to_empty(device="cpu")
    for tensor in (*reset.parameters(), *reset.buffers()):
        tensor.data.fill_(1)
    reset.reset_parameters()
    assert torch.equal(reset(query, key), make()(query, key))
    with torch.device("meta"):
        assert ah.AdaptiveSimilarity(12, 3, blocks=blocks)(query.to("meta"), key.to("meta")).shape == (3, 4, 5)


def test_names_in_the_state_dict():
    def names(blocks):
        return set(ah.AdaptiveSimilarity(12, debias=True, blocks=blocks).state_dict())

    single = {"w", "beta", "bias", "_extra_state"}  # the last one names the bases
    assert names(None) == names(4) == single
    assert names(UNEQUAL) == single | {"block_numbers"}
    assert names(ah.Blocks(4, normalize=True)) == single | {"norm"}
    assert names(NORMALIZED) == single | {"block_numbers", "norm"}


def test_another_number_of_blocks_in_a_checkpoint():
    state, layer = ah.AdaptiveSimilarity(12, blocks=6).state_dict(), ah.AdaptiveAttention(24, 2, blocks=None)
    named = ah.AdaptiveSimilarity(12, blocks=UNEQUAL)
    for module, given, message in (
        (ah.AdaptiveSimilarity(12, blocks=4), state, "must have 4 blocks, as the similarity, got w with 6"),
        (ah.AdaptiveSimilarity(12), state, "must have 12 blocks, as the similarity, got w with 6"),
        (named, named.state_dict() | {"block_numbers": torch.arange(12) // 4}, "4 blocks.* got block_numbers with 3"),
        (layer, layer.state_dict() | {"similarity.w": torch.ones(2, 2, 6)}, r"got similarity\.w with 6"),
    ):
        refuses(message, module.load_state_dict, given, strict=False)


def test_other_blocks_of_the_same_number_are_loaded():
    source = randomized(ah.AdaptiveSimilarity(12, blocks=UNEQUAL))
    similarity = ah.AdaptiveSimilarity(12, blocks=torch.arange(12) // 3)
    similarity.load_state_dict(source.state_dict())
    query, key = pair(dtype=torch.float32)
    assert torch.equal(similarity(query, key), source(query, key))


NEAR = ("l1", ("near", 0.1), ("near", 0.5))


def test_widths_are_quantiles_and_scale_with_the_data():
    keys = torch.rand(300, 8)
    similarity = ah.AdaptiveSimilarity(8, bases=NEAR, init="uniform").fix_scales_(keys)
    assert similarity.widths[0] == 1
    values = (keys[:, None] - keys).abs().flatten()
    expected = torch.quantile(values[values > 0][:100_000], torch.tensor([0.1, 0.5]))
    torch.testing.assert_close(similarity.widths[1:], expected, rtol=0.05, atol=0)
    large = ah.AdaptiveSimilarity(8, bases=NEAR, init="uniform").fix_scales_(1000 * keys)
    torch.testing.assert_close(large.widths[1:], 1000 * similarity.widths[1:])


def test_a_similarity_with_widths_and_units_is_saved_and_loaded():
    similarity = ah.AdaptiveSimilarity(6, bases=NEAR, init="uniform")
    similarity.units = torch.rand(6) + 0.5
    similarity.fix_scales_(torch.randn(20, 6))
    other = ah.AdaptiveSimilarity(6, bases=NEAR, init="l1")
    other.load_state_dict(similarity.state_dict())
    query, key = torch.randn(3, 6), torch.randn(5, 6)
    assert torch.equal(other(query, key), similarity(query, key))
    plain = ah.AdaptiveSimilarity(6, bases=NEAR, init="l1")
    other.load_state_dict(plain.state_dict())
    assert other.units is None
    with pytest.raises(ah.AHopError, match=r"must have the bases l1, near 0\.2, got l1, near 0\.1, near 0\.5"):
        ah.AdaptiveSimilarity(6, bases=("l1", ("near", 0.2)), init="l1").load_state_dict(similarity.state_dict())


def test_units_divide_the_dimensions():
    similarity = ah.AdaptiveSimilarity(4, bases=NEAR, init="uniform").fix_scales_(torch.randn(20, 4))
    query, key, unit = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0.1, 2.0, 1.0, 30.0])
    expected = similarity(query / unit, key / unit)
    similarity.units = unit
    torch.testing.assert_close(similarity(query, key), expected)


def test_quantiles_and_units_of_differences():
    assert quantiles(torch.tensor([0.0, 2.0, 2.0, 4.0, 4.0]), [0.25, 1.0]) == [1.0, 4.0]
    assert quantiles(torch.zeros(3), [0.5]) == [1.0]
    assert units(torch.tensor([[1.0, 0.0, 0.0], [3.0, 0.0, 0.0], [2.0, 0.0, 3.0]])).tolist() == [2.0, 1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [None, pytest.param(NORMALIZED, marks=pytest.mark.full)], ids=str)
def test_compile_without_a_graph_break_for_all_shapes(blocks):
    similarity = randomized(ah.AdaptiveSimilarity(12, 3, debias=True, blocks=blocks))
    torch.compiler.reset()  # the similarities of earlier tests count as recompilations
    compiled = torch.compile(similarity, fullgraph=True, dynamic=True, backend="aot_eager")
    for length, count in ((3, 4), (5, 9)):
        query, key = pair(2, 3, dtype=torch.float32, length=length, count=count)
        results = []
        for score in (similarity, compiled):
            scores = score(query, key)
            results.append((scores, *torch.autograd.grad(scores.square().sum(), list(similarity.parameters()))))
        torch.testing.assert_close(results[1], results[0])


@pytest.mark.slow
def test_export():
    similarity = ah.AdaptiveSimilarity(12, blocks=NORMALIZED)
    inputs = pair(2, dtype=torch.float32)
    torch.testing.assert_close(torch.export.export(similarity, inputs).module()(*inputs), similarity(*inputs))


def test_repr():
    assert repr(ah.AdaptiveSimilarity(12, blocks=4)).endswith("debias=False, blocks=4)")
    assert repr(ah.AdaptiveSimilarity(12)).endswith("debias=False)")
    named = ah.AdaptiveSimilarity(12, init=torch.ones(2, 4), blocks=UNEQUAL)
    assert repr(named).endswith("init=tensor, debias=False, blocks=tensor(n=4))")
    assert repr(ah.Blocks(3)) == "Blocks(3, normalize=False)"
    for blocks in (3, ah.Blocks(3, normalize=True)):
        similarity = ah.AdaptiveSimilarity(12, blocks=blocks)
        names = {"AdaptiveSimilarity": ah.AdaptiveSimilarity, "Blocks": ah.Blocks}
        assert repr(eval(repr(similarity), names)) == repr(similarity)


def test_blocks_are_frozen_copies():
    numbers = UNEQUAL.clone()
    blocks = ah.Blocks(numbers)
    numbers.zero_()
    assert torch.equal(blocks.assignment, UNEQUAL)
    with pytest.raises(AttributeError):
        blocks.normalize = True


def test_arrays_and_numpy_integers():
    query, key = pair(dtype=torch.float32)
    for blocks in (UNEQUAL, UNEQUAL.numpy(), UNEQUAL.to(torch.uint8), UNEQUAL.numpy().astype(np.int16)):
        assert ah.AdaptiveSimilarity(12, blocks=blocks, init="uniform")(query, key).shape == (4, 5)
    assert ah.AdaptiveSimilarity(12, blocks=np.int64(4)).w.shape == (2, 4)


def test_patches():
    expected = torch.tensor([[0, 0, 1, 1, 2], [0, 0, 1, 1, 2], [3, 3, 4, 4, 5]])
    assert torch.equal(ah.patches(3, 5, 2), expected.flatten())
    assert torch.equal(ah.patches(3, 5, 2, channels=3), expected.flatten().repeat(3))
    assert ah.patches(4, 4, 9).unique().tolist() == [0]
    with torch.device("meta"):
        assert not ah.patches(2, 2, 1).is_meta


def test_lazy_similarities():
    query, key = pair(2, 3, dtype=torch.float32)
    for blocks in (None, "auto", 4, ah.Blocks(4, normalize=True)):
        lazy = SimilarityOptions(debias=True, blocks=blocks).make_similarity(None, 3)
        assert isinstance(lazy, LazyAdaptiveSimilarity)
        expected = ah.AdaptiveSimilarity(12, 3, debias=True, blocks=blocks)
        assert torch.equal(lazy(query, key), expected(query, key))
        assert type(lazy) is ah.AdaptiveSimilarity
        assert repr(lazy) == repr(expected)
        assert lazy.state_dict().keys() == expected.state_dict().keys()
    for known in ({"blocks": UNEQUAL}, {"init": torch.ones(3, 2, 12)}):
        assert SimilarityOptions(**known).make_similarity(None, 3).dim == 12
    weights = torch.randn(3, 2, 4)
    lazy = SimilarityOptions(init=weights, blocks=4).make_similarity(None, 3)
    assert isinstance(lazy, LazyAdaptiveSimilarity)  # the last dimension of init is n
    lazy(query, key)
    assert torch.equal(lazy.w, weights)
    with pytest.raises(ah.AHopError, match="blocks must divide d = 12: expected one of 1, 2, 3, 4, 6, 12, got 5"):
        SimilarityOptions(blocks=5).make_similarity(None, 3)(query, key)
    refuses("init must have the shape of w", SimilarityOptions(init=torch.tensor(1.0)).make_similarity, None, 2)
    factory = SimilarityOptions(similarity=Scaled)
    refuses("a similarity factory needs the dimension of a head", factory.make_similarity, None, 2)


def test_lazy_similarities_load_checkpoints():
    query, key = pair(2, 3, dtype=torch.float32)
    for given, blocks in ((None, None), (4, 4), ("auto", 4), ("auto", None)):
        source = randomized(ah.AdaptiveSimilarity(12, 3, debias=True, blocks=blocks))
        lazy, other = (SimilarityOptions(debias=True, blocks=n).make_similarity(None, 3) for n in (given, 3))
        lazy.load_state_dict(source.state_dict())
        assert torch.equal(lazy(query, key), source(query, key))
        assert repr(lazy) == repr(source)
    refuses("must have 3 blocks", other.load_state_dict, source.state_dict())


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


def test_a_plain_function_is_a_similarity_that_can_do_nothing_else():
    def cosine(query, key):
        return nn.functional.normalize(query, dim=-1) @ nn.functional.normalize(key, dim=-1).mT

    query, key = pair()
    memory = ah.AssociativeMemory(key, cosine)
    assert torch.equal(memory.scores(query), cosine(query, key))
    assert not is_solvable(OwnSimilarity(cosine))
    refuses("explain needs a fixed or an adaptive similarity, got cosine", memory.explain, query)
    query[0, 0] = torch.nan
    refuses("queries x must not hold NaN for this similarity", memory.search, query)


@every_kind
def test_prepared_keys_and_explanations_give_the_scores(blocks):
    similarity = randomized(ah.AdaptiveSimilarity(12, bases=BASES, blocks=blocks).double())
    query, key = pair(count=4)
    similarity.fix_scales_(key)
    scores = similarity(query, key)
    torch.testing.assert_close(similarity(query, key, prepared=similarity.prepare(key)), scores)
    torch.testing.assert_close(similarity.explain(query, key).sum(-1), scores.diagonal().detach())
    subset = ah.AdaptiveSimilarity(12, 2, blocks=blocks)
    assert is_solvable(similarity)
    assert not is_solvable(subset)  # with heads
    refuses("explain needs a similarity without heads, got num_heads=2", subset.explain, query, query)
