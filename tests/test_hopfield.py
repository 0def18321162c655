"""Hopfield, HopfieldLayer, HopfieldPooling: equal to hflayers, except where hflayers is wrong."""

from types import ModuleType
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ahop_layers import hopfield
from ahop_layers.hopfield import adaptive
from tests.samples import refuses

NAMES = ("Hopfield", "HopfieldLayer", "HopfieldPooling")
PATTERNS = ("stored_pattern", "state_pattern", "pattern_projection")
NO_NORM = {f"normalize_{name}{suffix}": False for name in PATTERNS for suffix in ("", "_affine")}
STATIC = {f"{name}_as_static": True for name in PATTERNS}
WITHOUT_PARAMETERS = {**STATIC, **NO_NORM, "disable_out_projection": True}  # and of any size


@pytest.fixture(scope="module")
def hflayers():
    return pytest.importorskip("hflayers", reason="hopfield-layers is not installed: make test-hflayers")


@pytest.mark.parametrize("name", NAMES)
def test_initialization(name):
    layer = getattr(hopfield, name)(200, num_heads=2, **({} if name == "Hopfield" else {"quantity": 50}))
    for key, parameter in layer.named_parameters():
        if "norm" in key:
            assert (parameter == (1 if key.endswith("weight") else 0)).all()
        elif key.endswith("bias"):
            assert (parameter == 0).all()
        else:
            assert abs(parameter.std() - 0.02) < 2e-3, key
            assert abs(parameter.mean()) < 1e-3, key


def test_properties_return_the_constructor_arguments():
    layer = hopfield.HopfieldPooling(12, 4, 6, 5, 2, quantity=3, stored_pattern_size=8, update_steps_max=2)
    assert (layer.input_size, layer.hidden_size, layer.output_size, layer.pattern_size) == (12, 4, 6, 5)
    assert (layer.stored_pattern_dim, layer.state_pattern_dim, layer.pattern_projection_dim) == (8, 12, 12)
    assert (layer.quantity, layer.update_steps_max, layer.update_steps_eps, layer.scaling) == (3, 2, 1e-4, 0.5)
    assert layer.batch_first
    assert not layer.stored_pattern_as_static
    assert layer.normalize_stored_pattern
    assert layer.normalize_stored_pattern_affine
    assert not layer.normalize_hopfield_space
    layer = hopfield.HopfieldPooling(12, normalize_hopfield_space=True, normalize_hopfield_space_affine=True)
    assert (layer.normalize_hopfield_space, layer.normalize_hopfield_space_affine) == (True, True)


@pytest.mark.parametrize("module", [None, ModuleType("hflayers")], ids=["missing", "another module of this name"])
def test_adaptive_layers_do_not_need_hflayers(module):
    with patch.dict("sys.modules", {"hflayers": module}):
        assert adaptive._base(hopfield.Hopfield) is hopfield.Hopfield


FLAGS = ("normalize_hopfield_space", "pattern_projection_as_connected", "input_bias", "add_zero_association",
         "disable_out_projection", "batch_first", "concat_bias_pattern")  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    sizes=st.fixed_dictionaries({}, optional={
        "hidden_size": st.sampled_from([3, 8]), "output_size": st.just(5), "num_heads": st.sampled_from([2, 3]),
        "scaling": st.just(1.5), "update_steps_max": st.sampled_from([1, 3, None]),
        "association_activation": st.just("tanh"), **{flag: st.booleans() for flag in FLAGS}}),
    mask=st.booleans(),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_random_arguments_agree_with_hflayers(hflayers, name, sizes, mask, seed):
    torch.manual_seed(seed)
    extra = {} if name == "Hopfield" else {"quantity": 4}
    theirs, ours = (getattr(each, name)(12, **sizes, **extra).eval() for each in (hflayers, hopfield))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    stored = 4 if name == "HopfieldLayer" else 6
    padding = torch.zeros(3, stored, dtype=torch.bool)
    padding[:, 2] = mask
    x = torch.randn(3, 6, 12) if sizes.get("batch_first", True) else torch.randn(6, 3, 12)
    for method in ("forward", "get_association_matrix", "get_projected_pattern_matrix"):
        expected = getattr(theirs, method)(x, stored_pattern_padding_mask=padding)
        got = getattr(ours, method)(x, stored_pattern_padding_mask=padding)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_bad_inputs_raise():
    layer, x = hopfield.Hopfield(12, num_heads=2), torch.randn(3, 7, 12)
    for bad, message in (
        (torch.randn(7, 12), r"3 dimensions, \(N, rows, size\), got \(7, 12\)"),
        (torch.randn(3, 7, 11), r"must be \(N, rows, 12\), got \(3, 7, 11\)"),
        ((x, x), "stored, state and projection patterns, got 2"),
        ((x, x[:2], x), r"one N and one S, got \(3, 7, 12\), \(2, 7, 12\), \(3, 7, 12\)"),
        ((x, x, x[:, :5]), "one N and one S"),
        ((x, None, x), "must be a tensor, got NoneType"),
    ):
        refuses(message, layer, bad)
    refuses("stored and projection patterns, got 3", hopfield.HopfieldPooling(12), (x, x, x))
    refuses("got tuple", hopfield.HopfieldLayer(12), (x,))
    refuses("quantity must be an integer of at least 1, got 0", hopfield.HopfieldPooling, 12, quantity=0)


def test_a_uint8_mask_warns_and_works():
    layer, x, mask = hopfield.Hopfield(12, num_heads=2), torch.randn(2, 4, 12), torch.eye(4, dtype=torch.uint8)
    with pytest.warns(DeprecationWarning, match="uint8 association_mask is deprecated"):
        output = layer(x, association_mask=mask)
    torch.testing.assert_close(output, layer(x, association_mask=mask.bool()))
    with pytest.warns(DeprecationWarning, match="uint8 stored_pattern_padding_mask"):
        layer(x, stored_pattern_padding_mask=torch.zeros(2, 4, dtype=torch.uint8))


def test_a_float_padding_mask_of_0_and_1_is_refused_and_one_that_is_added_is_not():
    layer, x = hopfield.Hopfield(12, num_heads=2), torch.randn(2, 4, 12)
    mask = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
    refuses(
        "stored_pattern_padding_mask must be a bool mask, True = ignore", layer, x, stored_pattern_padding_mask=mask
    )
    expected = layer(x, stored_pattern_padding_mask=mask.bool())
    added = torch.where(mask.bool(), -torch.inf, 0.0)
    torch.testing.assert_close(layer(x, stored_pattern_padding_mask=added), expected)
    torch.testing.assert_close(layer(x, stored_pattern_padding_mask=0 * mask), layer(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_patterns_of_another_dtype_are_refused_unless_autocast_converts_them(dtype):
    for norms in ({}, NO_NORM):
        layer, x = adaptive.AdaptiveHopfieldPooling(12, num_heads=2, **norms), torch.randn(2, 4, 12).to(dtype)
        rule = f"patterns must have the dtype of the layer, torch.float32, got {dtype}"
        refuses(rule, layer, x)
        refuses(rule, layer.pool_packed, x[0], [1, 3])
        if dtype == torch.float16:
            with torch.autocast("cpu", torch.bfloat16):
                assert layer(x).shape == layer.pool_packed(x[0], [1, 3]).shape == (2, 12)


def test_a_float_mask_of_any_dtype():
    layer, x = hopfield.Hopfield(12, num_heads=2), torch.randn(2, 4, 12)
    mask = torch.randint(-2, 3, (4, 4)).float()
    expected = layer(x, association_mask=mask)
    for dtype in (torch.bfloat16, torch.float64):
        torch.testing.assert_close(layer(x, association_mask=mask.to(dtype)), expected)


def test_tensor_scaling_is_a_buffer_and_works_with_update_steps():
    layer = hopfield.Hopfield(12, 4, num_heads=2, scaling=torch.tensor([0.5, 3.0]), update_steps_max=3)
    assert "association_core.scaling" in dict(layer.named_buffers())
    assert layer.double().scaling.dtype == torch.double
    output = layer(torch.randn(3, 7, 12).double())
    assert output.isfinite().all()
    halves = hopfield.Hopfield(12, 4, num_heads=2, scaling=torch.full((2,), 0.5), update_steps_max=3)
    number = hopfield.Hopfield(12, 4, num_heads=2, scaling=0.5, update_steps_max=3)
    number.load_state_dict(halves.state_dict())
    x = torch.randn(3, 7, 12)
    torch.testing.assert_close(halves(x), number(x))


def test_pooling_with_batch_first_false():
    first, second = (hopfield.HopfieldPooling(12, quantity=2, batch_first=flag) for flag in (True, False))
    second.hopfield.load_state_dict(first.hopfield.state_dict())
    second.pooling_weights.data = first.pooling_weights.data.transpose(0, 1)
    bags = torch.randn(3, 7, 12)
    expected = first(bags).unflatten(1, (2, 12)).transpose(0, 1).flatten(1)
    torch.testing.assert_close(second(bags.transpose(0, 1)), expected)
    assert expected.shape == (2, 36)


def test_static_patterns_of_several_heads_do_not_mix_samples():
    layer = hopfield.Hopfield(num_heads=2, **WITHOUT_PARAMETERS)
    stored, state = torch.randn(3, 7, 4), torch.randn(3, 5, 4)
    alone = torch.cat([layer((stored[i : i + 1], state[i : i + 1], stored[i : i + 1])) for i in range(3)])
    torch.testing.assert_close(layer((stored, state, stored)), alone)
    assert alone.shape == (3, 5, 8)
