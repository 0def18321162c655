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


def test_a_map_has_a_color_bar_on_request_and_is_transparent_without_weight():
    weights = torch.tensor([[0.0, 0.0, 0.25, 0.75, 0.0]])
    figure = plots.association_map(weights, torch.rand(4, 4), patches=(2, 2), colorbar=True)
    assert figure.axes[1].get_ylim() == pytest.approx((0, 0.75))
    overlay = figure.axes[0].images[1]
    np.testing.assert_allclose(np.asarray(overlay.get_alpha()) > 0, [[False, True], [True, False]])


BLOCKS = [None, ah.Blocks(3, normalize=True), 1, torch.tensor([0, 0, 1, 2, 2, 2])]
TITLES = ["0", "1, 3 normalized blocks", "2, 1 block", "3, 3 blocks"]


@pytest.fixture
def model():
    parts = [ah.AdaptiveSimilarity(6, num_heads=2, blocks=blocks) for blocks in BLOCKS]
    return nn.Sequential(*parts, nn.Linear(2, 2), ah.AdaptiveSimilarity(4, bases=("l1",), init="uniform"))


@pytest.mark.parametrize(("folded", "change"), [(True, False), (False, True)])
def test_weights_of_every_layer_head_and_base(model, folded, change):
    columns = [*model[:4], model[5]]

    def weights():
        found = [part.footprint_weight().detach().clone() for part in columns]
        return [fold(weight) if folded else weight for weight in found]

    initial = weights()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    state = deepcopy(model.state_dict())
    axes = np.array(plots.footprint_weights(model, folded=folded, change=change).axes).reshape(2, len(columns))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())  # not reset itself
    assert [axis.get_title() for axis in axes[0]] == [*TITLES, "5"]
    assert [text.get_text() for text in axes[0][0].get_legend().get_texts()] == ["dis", "dot"]
    for panels, part, old, new in zip(axes.T, columns, initial, weights(), strict=True):
        expected = (new - old if change else new).reshape(part.num_heads or 1, len(part.bases), -1)
        assert [panel.get_visible() for panel in panels] == [head < len(expected) for head in range(2)]
        for panel, lines in zip(panels, expected, strict=False):
            shown = [[bar.get_height() for bar in bars] for bars in panel.containers]
            assert bool(shown) == (part.blocks.assignment is not None)
            if shown:  # the bases side by side at each rank
                places = [[bar.get_x() + bar.get_width() / 2 for bar in bars] for bars in panel.containers]
                np.testing.assert_allclose(np.mean(places, 0), range(1, lines.shape[-1] + 1))
                assert lines.shape[-1] == 1 or all(float(tick).is_integer() for tick in panel.get_xticks())
            shown = shown or [line.get_ydata() for line in panel.lines[: len(lines)]]
            np.testing.assert_allclose(shown, lines, rtol=1e-5, atol=1e-6)


def test_lines_that_coincide_have_styles_of_their_own():
    similarity = ah.AdaptiveSimilarity(5, bases=("dis", "dot", "l1"))
    panel = plots.footprint_weights(similarity).axes[0]
    assert [line.get_ydata().tolist() for line in panel.lines[:3]] == [[0] * 5, [1] * 5, [0] * 5]  # constant at first
    assert len({line.get_linestyle() for line in panel.lines[:3]}) == 3


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_steps_lead_from_the_pair_to_its_score(blocks):
    similarity = ah.AdaptiveSimilarity(6, bases=("dis", "l1"), init="uniform", debias=True, blocks=blocks)
    for parameter in similarity.parameters():
        nn.init.normal_(parameter)
    query, keys = torch.randn(6), torch.randn(3, 6)
    axes = plots.footprint_steps(similarity, query, keys, ["a", "b", "c"]).axes
    lines = [np.array([line.get_ydata() for line in axis.lines[:3]]) for axis in axes]
    rows = [lines[i : i + 4] for i in range(0, len(lines), 4)]
    for number, (similarities, ordered, footprint, _) in enumerate(rows):
        np.testing.assert_allclose(np.sort(similarities), np.sort(ordered), rtol=1e-6)
        assert (np.diff(ordered) <= 0).all()
        assert ordered.shape[1] == similarity.blocks.count(6)
        if blocks is None:
            expected = ah.footprint(similarity.unbiased(query[None]), keys, similarity.bases[number])[0].detach()
            np.testing.assert_allclose(footprint, expected, rtol=1e-4, atol=1e-5)
    scores = similarity(query[None], keys)[0].detach()
    np.testing.assert_allclose(sum(row[3][:, -1] for row in rows), scores, rtol=1e-4, atol=1e-4)
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["a", "b", "c"]


@pytest.mark.parametrize("channels", [None, 2])
def test_a_block_map_shows_which_blocks_agree(channels):
    blocks = ah.Blocks(ah.patches(4, 6, 2, channels or 1), normalize=True)
    similarity = ah.AdaptiveSimilarity(24 * (channels or 1), blocks=blocks)
    query = torch.randn(*([] if channels is None else [channels]), 4, 6)
    key = torch.randn_like(query)
    key[..., 2:, 4:] = 3 * query[..., 2:, 4:] + 1  # the last patch, with another gain and offset
    axis = plots.block_map(similarity, query, key, base="dot", title="blocks").axes[0]
    shown = axis.images[0].get_array()
    assert shown.shape == (4, 6)
    assert (shown == np.kron(shown[::2, ::2], np.ones((2, 2)))).all()  # one value for each patch
    np.testing.assert_allclose(shown[2:, 4:], 1.0, rtol=0.01)  # the correlation
    assert shown[:2].max() < 0.99
    plain = ah.AdaptiveSimilarity(24 * (channels or 1))
    single = plots.block_map(plain, query, key).axes[0].images[0].get_array()
    distance = -(query - key).square().reshape(-1, 4, 6).mean(0)
    np.testing.assert_allclose(single, distance, rtol=1e-5)


MAP = {"weights": torch.rand(2, KEYS, KEYS), "image": torch.rand(6, 8), "patches": (3, 4)}
STEPS = {"similarity": ah.AdaptiveSimilarity(7), "query": torch.zeros(7), "keys": torch.zeros(3, 7)}
BLOCK_MAP = {"similarity": ah.AdaptiveSimilarity(12), "query": torch.zeros(3, 4), "key": torch.zeros(3, 4)}
TWO_LAYERS = nn.Sequential(ah.AdaptiveSimilarity(5, num_heads=3), ah.AdaptiveSimilarity(5))
ERRORS = [
    (MAP, {"weights": torch.rand(KEYS)}, r"weights must be \(L, S\) or \(H, L, S\), got \(13,\)"),
    (MAP, {"image": torch.rand(2, 6, 8)}, r"image must be .* got \(2, 6, 8\)"),
    (MAP, {"patches": (4, 4)}, r"at most 13 patches, got \(4, 4\)"),
    (MAP, {"patches": (2, "4")}, r"got \(2, '4'\)"),
    (MAP, {"token": 13}, "an index of one of the 13 queries, got 13"),
    (MAP, {"vmax": "1"}, "vmax must be a positive number, got '1'"),
    (STEPS, {"similarity": ah.AdaptiveSimilarity(7, num_heads=2)}, "similarity must have num_heads=None, got 2"),
    (STEPS, {"similarity": nn.Linear(7, 7)}, "similarity must be an AdaptiveSimilarity, got Linear"),
    (STEPS, {"keys": torch.zeros(3, 6)}, r"must be \(7,\) and \(S, 7\), got \(7,\) and \(3, 6\)"),
    (STEPS, {"names": ["a"]}, "one entry for each of the 3 keys, got 1"),
    (BLOCK_MAP, {"query": torch.zeros(12)}, r"height, width\) with 12 values, got \(12,\) and \(3, 4\)"),
    (BLOCK_MAP, {"key": torch.zeros(4, 3)}, r"got \(3, 4\) and \(4, 3\)"),
    (BLOCK_MAP, {"base": "l1"}, "base must be one of dis, dot, got 'l1'"),
    ({}, {"source": nn.Linear(2, 2)}, "source must contain an AdaptiveSimilarity, got Linear without one"),
    ({}, {"source": None}, "source must be a module, got NoneType"),
    ({}, {"source": TWO_LAYERS, "ax": Figure().subplots()}, "one layer with one head, got 2 layers with up to 3"),
]


@pytest.mark.parametrize(("arguments", "change", "message"), ERRORS)
def test_errors(arguments, change, message):
    functions = {"weights": plots.association_map, "keys": plots.footprint_steps, "key": plots.block_map}
    function = next((functions[name] for name in functions if name in arguments), plots.footprint_weights)
    with pytest.raises(ah.AHopError, match=message):
        function(**arguments | change)


@pytest.mark.parametrize("style", ["default", "dark_background"])
def test_text_and_lines_contrast_with_light_and_dark_backgrounds(model, style):
    with matplotlib.style.context(style):
        figure = plots.footprint_weights(model[5])
    background = np.array(matplotlib.colors.to_rgb(figure.get_facecolor()))
    axis = figure.axes[0]
    for color in (axis.title.get_color(), *(line.get_color() for line in axis.lines)):
        assert np.abs(np.array(matplotlib.colors.to_rgb(color)) - background).max() > 0.3


@pytest.mark.parametrize("shape", [(12,), (3, 4), (3, 2, 2)])
def test_an_explanation_shows_query_pattern_and_contributions(shape):
    memory = ah.AssociativeMemory(torch.rand(9, *shape))
    query = memory.patterns[4].clone()
    query.view(-1)[:2] = torch.tensor([5.0, torch.nan])
    figure = plots.explanation(memory, query)
    assert [axis.get_title() for axis in figure.axes] == ["query", "pattern 4", "share of the score"]
    last = figure.axes[-1]
    drawn = [bar.get_height() for bar in last.patches] if len(shape) == 1 else last.images[0].get_array().sum()
    torch.testing.assert_close(float(np.sum(drawn)), memory.search(query).scores.item(), rtol=1e-4, atol=1e-4)
    assert plots.explanation(memory, query, index=2).axes[1].get_title() == "pattern 2"
    with pytest.raises(ah.AHopError, match="query must be one query of the shape"):
        plots.explanation(memory, memory.patterns[:2])
