"""Plots show the given weights, in any style, without a window."""

from copy import deepcopy

import matplotlib.style
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import ahop_layers as ah
from ahop_layers import plots
from ahop_layers.ops.reference import fold

pytestmark = pytest.mark.slow

KEYS = 13  # a class token and 3 x 4 patches


@pytest.fixture
def weights():
    return torch.rand(2, KEYS, KEYS).softmax(-1)


def drawn(figure):
    """Returns the image and the map drawn over it."""
    return [np.asarray(picture.get_array()) for picture in figure.axes[0].images]


@pytest.mark.parametrize(("token", "shape"), [(0, (6, 8)), (5, (3, 6, 8))])
def test_a_map_shows_the_patches_of_its_token_over_normalized_pixels(weights, token, shape):
    figure = plots.association_map(weights, 40 * torch.rand(shape) - 300, patches=(3, 4), token=token)
    below, overlay = drawn(figure)
    np.testing.assert_allclose(overlay, weights.mean(0)[token, 1:].reshape(3, 4), rtol=1e-6)
    assert below.shape[:2] == (6, 8)
    assert (below.min(), below.max()) == (0, 1)
    assert len({tuple(picture.get_extent()) for picture in figure.axes[0].images}) == 1


def test_a_constant_image_half_precision_and_a_default_grid_on_given_axes():
    figure = Figure()
    axes = figure.subplots(1, 2)
    assert plots.association_map(torch.rand(17, 17).bfloat16(), torch.full((8, 8), 7.0), ax=axes[1]) is figure
    assert [len(axis.images) for axis in axes] == [0, 2]
    below, overlay = (np.asarray(picture.get_array()) for picture in axes[1].images)
    assert np.isfinite(below).all()
    assert overlay.shape == (4, 4)


def test_maps_with_a_common_scale_have_one_color_for_a_weight(weights):
    pair = (weights[0], 0.5 * weights[0])
    figures = [plots.association_map(each, torch.rand(6, 8), patches=(3, 4), vmax=0.4) for each in pair]
    overlays = [figure.axes[0].images[1] for figure in figures]
    assert [overlay.get_clim() for overlay in overlays] == [(0, 0.4), (0, 0.4)]
    np.testing.assert_allclose(overlays[1].get_alpha(), overlays[0].get_alpha() * 0.5**0.5, rtol=1e-5)


def test_a_map_is_transparent_without_weight():
    weights = torch.tensor([[0.0, 0.0, 0.25, 0.75, 0.0]])
    overlay = plots.association_map(weights, torch.rand(4, 4), patches=(2, 2)).axes[0].images[1]
    assert overlay.get_clim() == (0, 0.75)
    np.testing.assert_allclose(np.asarray(overlay.get_alpha()) > 0, [[False, True], [True, False]])


@pytest.fixture
def model():
    first = ah.AdaptiveSimilarity(6, num_heads=2, blocks=ah.Blocks(3, normalize=True))
    return nn.Sequential(first, nn.Linear(2, 2), ah.AdaptiveSimilarity(4, bases=("l1",), init="uniform"))


@pytest.mark.parametrize("change", [False, True])
def test_weights_of_every_layer_head_and_base(model, change):
    def weights():
        return [fold(part.footprint_weight()).detach().clone() for part in (model[0], model[2])]

    initial = weights()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    state = deepcopy(model.state_dict())
    axes = np.array(plots.footprint_weights(model, change=change).axes).reshape(2, 2)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())  # not reset itself
    assert [axis.get_title() for axis in axes[0]] == ["0, blocks: 3", "2"]
    assert [axis.get_visible() for axis in axes.flat] == [True, True, True, False]  # the second layer has one head
    assert [text.get_text() for text in axes[0][0].get_legend().get_texts()] == ["dis", "dot"]
    by_block, lines = (new - old if change else new for new, old in zip(weights(), initial, strict=True))
    for panel, expected in zip(axes[:, 0], by_block, strict=True):
        np.testing.assert_allclose([[bar.get_height() for bar in bars] for bars in panel.containers], expected)
        places = [[bar.get_x() + bar.get_width() / 2 for bar in bars] for bars in panel.containers]
        np.testing.assert_allclose(np.mean(places, 0), [1, 2, 3])  # the bases side by side at each rank
        assert all(float(tick).is_integer() for tick in panel.get_xticks())
    np.testing.assert_allclose(axes[0, 1].lines[0].get_ydata(), lines[0])


def test_lines_that_coincide_have_styles_of_their_own():
    similarity = ah.AdaptiveSimilarity(5, bases=("dis", "dot", "l1"))
    panel = plots.footprint_weights(similarity).axes[0]
    assert [line.get_ydata().tolist() for line in panel.lines[:3]] == [[0] * 5, [1] * 5, [0] * 5]  # constant at first
    assert len({line.get_linestyle() for line in panel.lines[:3]}) == 3


MAP = {"weights": torch.rand(2, KEYS, KEYS), "image": torch.rand(6, 8), "patches": (3, 4)}
ERRORS = [
    (MAP, {"weights": torch.rand(KEYS)}, r"weights must be \(L, S\) or \(H, L, S\), got \(13,\)"),
    (MAP, {"image": torch.rand(2, 6, 8)}, r"image must be .* got \(2, 6, 8\)"),
    (MAP, {"patches": (4, 4)}, r"at most 13 patches, got \(4, 4\)"),
    (MAP, {"patches": (2, "4")}, "columns must be an integer of at least 1, got '4'"),
    (MAP, {"token": 13}, "an index of one of the 13 queries, got 13"),
    (MAP, {"vmax": "1"}, "vmax must be a positive number, got '1'"),
    ({}, {"source": nn.Linear(2, 2)}, "source must contain an AdaptiveSimilarity, got Linear without one"),
    ({}, {"source": None}, "source must be a module, got NoneType"),
]


@pytest.mark.parametrize(("arguments", "change", "message"), ERRORS)
def test_errors(arguments, change, message):
    function = plots.association_map if arguments else plots.footprint_weights
    with pytest.raises(ah.AHopError, match=message):
        function(**arguments | change)


@pytest.mark.parametrize("style", ["default", "dark_background"])
def test_text_and_lines_contrast_with_light_and_dark_backgrounds(model, style):
    with matplotlib.style.context(style):
        figure = plots.footprint_weights(model[2])
    background = np.array(matplotlib.colors.to_rgb(figure.get_facecolor()))
    axis = figure.axes[0]
    for color in (axis.title.get_color(), *(line.get_color() for line in axis.lines)):
        assert np.abs(np.array(matplotlib.colors.to_rgb(color)) - background).max() > 0.3


@pytest.mark.parametrize("shape", [(12,), (3, 4), (3, 2, 2)])
def test_an_explanation_shows_query_pattern_and_contributions(shape):
    memory = ah.AssociativeMemory(torch.rand(9, *shape))
    query = memory.patterns[4].clone()
    query.view(-1)[:2] = torch.tensor([5.0, torch.nan])
    axes = plots.explanation(memory, query).axes
    assert [axis.get_title() for axis in axes] == ["query", "pattern 4", "share of the score"]
    asked, pattern, reasons = query.nan_to_num(0.0), memory.patterns[4], memory.explain(query)
    if len(shape) == 1:
        shown = [[bar.get_height() for bar in axis.patches] for axis in axes]
        expected = [asked, pattern, reasons]
    else:
        shown = [axis.images[0].get_array() for axis in axes]
        images = [(each - each.min()) / (each.max() - each.min()) for each in (asked, pattern)]
        expected = [*(image.movedim(0, -1) if len(shape) == 3 else image for image in images)]
        expected.append(reasons.reshape(-1, *shape[-2:]).sum(0))
    for drawn_values, values in zip(shown, expected, strict=True):
        np.testing.assert_allclose(drawn_values, values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(float(np.sum(shown[2])), memory.search(query).scores.item(), rtol=1e-4, atol=1e-4)
    assert plots.explanation(memory, query, index=2).axes[1].get_title() == "pattern 2"
    with pytest.raises(ah.AHopError, match="query must be one query of the shape"):
        plots.explanation(memory, memory.patterns[:2])


@pytest.mark.parametrize("shape", [(12,), (3, 4)])
def test_a_repair_shows_query_repaired_values_and_probabilities(shape):
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(60, 2, generator=generator) @ torch.rand(2, 12, generator=generator)
    memory = ah.AssociativeMemory(rows.reshape(-1, *shape), "l1")  # whose fit is short
    memory.fit()
    query = memory.patterns[4].clone()
    query.view(-1)[:2] = torch.tensor([9.0, torch.nan])
    values, intact = memory.repair(query)
    axes = plots.repair(memory, query.numpy()).axes
    assert [axis.get_title() for axis in axes] == ["query", "repaired", "probability of being intact"]
    if len(shape) == 1:
        heights = [[bar.get_height() for bar in axis.patches] for axis in axes]
        for drawn_values, expected in zip(heights, (query.nan_to_num(0.0), values, intact), strict=True):
            np.testing.assert_allclose(drawn_values, expected, rtol=1e-5, atol=1e-6)
        colors = [bar.get_facecolor() for bar in axes[0].patches]
        suspicious = [color == colors[0] for color in colors]
        assert suspicious == (intact < 0.5).tolist()
        assert sum(suspicious) >= 2
    else:
        np.testing.assert_allclose(axes[2].images[0].get_array(), intact, rtol=1e-5)
        np.testing.assert_allclose(
            axes[1].images[0].get_array(), (values - values.min()) / (values.max() - values.min())
        )
    with pytest.raises(ah.AHopError, match="query must be one query of the shape"):
        plots.repair(memory, memory.patterns[:2])
