"""Plots show the given weights, in any style, without a window."""

import matplotlib.style
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import ahop_layers as ah
from ahop_layers import plots
from ahop_layers.ops.reference import fold

KEYS = 13  # a class token and 3 x 4 patches


@pytest.fixture
def weights():
    return torch.rand(2, KEYS, KEYS).softmax(-1)


def drawn(figure):
    """Returns the image and the map drawn over it."""
    return [np.asarray(picture.get_array()) for picture in figure.axes[0].images]


@pytest.mark.parametrize(("token", "shape"), [(0, (6, 8)), (5, (1, 6, 8)), (5, (3, 6, 8))])
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


def heights(axis):
    """Returns the weights of two bases that a panel shows as bars or as lines."""
    bars = [[bar.get_height() for bar in bars] for bars in axis.containers]
    return bars or [line.get_ydata() for line in axis.lines[:2]]


@pytest.fixture
def model():
    second = ah.AdaptiveSimilarity(4, bases=("l1",), init="uniform")
    model = nn.Sequential(ah.AdaptiveSimilarity(5, num_heads=3), nn.Linear(2, 2), second)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("folded", [True, False])
def test_weights_of_every_layer_head_and_base(model, folded):
    axes = plots.footprint_weights(model, folded=folded).axes
    shown = [axis for axis in axes if axis.get_visible()]
    assert len(shown) == 3 + 1  # three heads in one layer, one in the other
    first = model[0]
    expected = (first.beta[..., None] * first.w).detach()
    expected = fold(expected) if folded else expected
    for head, axis in enumerate(axes[::2]):
        assert [line.get_label() for line in axis.lines[:2]] == list(first.bases)
        np.testing.assert_allclose(heights(axis), expected[head], rtol=1e-6)


@pytest.mark.parametrize("folded", [True, False])
def test_the_change_of_weights_is_their_difference_from_the_initial_ones(folded):
    initial = plots.footprint_weights(ah.AdaptiveSimilarity(6)).axes[0]
    np.testing.assert_array_equal(heights(initial), [[0] * 6, [1] * 6])
    similarity = ah.AdaptiveSimilarity(4, num_heads=2, init="uniform", blocks=[None, 2])
    axes = plots.footprint_weights(similarity, folded=folded, change=True).axes
    assert not any(np.any(line.get_ydata()) for axis in axes[::2] for line in axis.lines)
    before = [similarity.footprint_weight(index).detach().clone() for index in range(2)]
    for parameter in similarity.parameters():
        nn.init.normal_(parameter)
    state = {name: value.clone() for name, value in similarity.state_dict().items()}
    axes = plots.footprint_weights(similarity, folded=folded, change=True).axes
    assert all(torch.equal(value, similarity.state_dict()[name]) for name, value in state.items())  # not reset itself
    for index in range(2):
        change = similarity.footprint_weight(index).detach() - before[index]
        change = fold(change) if folded else change
        for head in range(2):
            axis = axes[2 * head + index]
            np.testing.assert_allclose(heights(axis), change[head], rtol=1e-5, atol=1e-6)


def test_lines_that_coincide_have_styles_of_their_own():
    similarity = ah.AdaptiveSimilarity(5, bases=("dis", "dot", "l1"))
    panel = plots.footprint_weights(similarity).axes[0]
    assert len({line.get_linestyle() for line in panel.lines[:3]}) == 3
    keys = torch.ones(4, 5)
    steps = plots.footprint_steps(similarity, torch.ones(5), keys).axes[0]
    assert len({line._unscaled_dash_pattern[1] for line in steps.lines[:4]}) == 4


BLOCKS = {
    "unequal": (torch.tensor([0, 0, 1, 2, 2, 2]), ["3 blocks"]),
    "several": ([None, ah.Blocks(3, normalize=True), 1], ["6 dimensions", "3 normalized blocks", "1 block"]),
}


@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize(("blocks", "titles"), BLOCKS.values(), ids=BLOCKS)
def test_weights_of_blocks_are_bars_by_rank(blocks, titles, folded):
    similarity = ah.AdaptiveSimilarity(6, num_heads=2, blocks=blocks)
    for parameter in similarity.parameters():
        nn.init.normal_(parameter)
    count = len(similarity.blocks)
    axes = plots.footprint_weights(similarity, folded=folded).axes
    assert len(axes) == 2 * count  # a column for each resolution
    assert [axis.get_title() for axis in axes[:count]] == [f"similarity, {title}" for title in titles]
    for index, entry in enumerate(similarity.blocks):
        weights = similarity.footprint_weight(index).detach()
        weights = fold(weights) if folded else weights
        for head in range(2):
            axis, n = axes[head * count + index], entry.count(6)
            assert bool(axis.containers) == (entry.blocks is not None)
            if axis.containers:
                places = np.mean([[bar.get_x() + bar.get_width() / 2 for bar in bars] for bars in axis.containers], 0)
                np.testing.assert_allclose(places, range(1, n + 1))  # the bases side by side at each rank
                assert n == 1 or all(float(tick).is_integer() for tick in axis.get_xticks())
            np.testing.assert_allclose(heights(axis), weights[head], rtol=1e-6)
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["dis", "dot"]


@pytest.mark.parametrize("blocks", [None, *(blocks for blocks, _ in BLOCKS.values())], ids=["dimensions", *BLOCKS])
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
        assert ordered.shape[1] == similarity.blocks[number // 2].count(6)
        if blocks is None:
            expected = ah.footprint(similarity.unbiased(query[None]), keys, similarity.bases[number])[0].detach()
            np.testing.assert_allclose(footprint, expected, rtol=1e-4, atol=1e-5)
    scores = similarity(query[None], keys)[0].detach()
    np.testing.assert_allclose(sum(row[3][:, -1] for row in rows), scores, rtol=1e-4, atol=1e-4)
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["a", "b", "c"]


@pytest.mark.parametrize("channels", [None, 2])
def test_a_block_map_shows_which_blocks_agree(channels):
    blocks = [None, ah.Blocks(ah.patches(4, 6, 2, channels or 1), normalize=True)]
    similarity = ah.AdaptiveSimilarity(24 * (channels or 1), blocks=blocks)
    query = torch.randn(*([] if channels is None else [channels]), 4, 6)
    key = torch.randn_like(query)
    key[..., 2:, 4:] = 3 * query[..., 2:, 4:] + 1  # the last patch, with another gain and offset
    axis = plots.block_map(similarity, query, key, base="dot", resolution=1, title="blocks").axes[0]
    shown = axis.images[0].get_array()
    assert shown.shape == (4, 6)
    assert (shown == np.kron(shown[::2, ::2], np.ones((2, 2)))).all()  # one value for each patch
    np.testing.assert_allclose(shown[2:, 4:], 1.0, rtol=0.01)  # the correlation
    assert shown[:2].max() < 0.99
    single = plots.block_map(similarity, query, key).axes[0].images[0].get_array()
    distance = -(query - key).square().reshape(-1, 4, 6).mean(0)
    np.testing.assert_allclose(single, distance, rtol=1e-5)


MAP = {"weights": torch.rand(2, KEYS, KEYS), "image": torch.rand(6, 8), "patches": (3, 4)}
STEPS = {"similarity": ah.AdaptiveSimilarity(7), "query": torch.zeros(7), "keys": torch.zeros(3, 7)}
BLOCK_MAP = {"similarity": ah.AdaptiveSimilarity(12), "query": torch.zeros(3, 4), "key": torch.zeros(3, 4)}
TWO_LAYERS = nn.Sequential(ah.AdaptiveSimilarity(5, num_heads=3), ah.AdaptiveSimilarity(5))
ERRORS = [
    (MAP, {"weights": torch.rand(KEYS)}, r"weights must be \(L, S\) or \(H, L, S\), got \(13,\)"),
    (MAP, {"image": torch.rand(2, 6, 8)}, r"image must be .* got \(2, 6, 8\)"),
    (MAP, {"image": "cat.png"}, "image must be .* got str"),
    (MAP, {"patches": (4, 4)}, r"at most 13 patches, got \(4, 4\)"),
    (MAP, {"patches": 4}, "at most 13 patches, got 4"),
    (MAP, {"patches": (2, "4")}, r"got \(2, '4'\)"),
    (MAP, {"token": 13}, "an index of one of the 13 queries, got 13"),
    (MAP, {"vmax": "1"}, "vmax must be a positive number, got '1'"),
    (STEPS, {"similarity": ah.AdaptiveSimilarity(7, num_heads=2)}, "similarity must have num_heads=None, got 2"),
    (STEPS, {"similarity": nn.Linear(7, 7)}, "similarity must be an AdaptiveSimilarity, got Linear"),
    (STEPS, {"keys": torch.zeros(3, 6)}, r"must be \(7,\) and \(S, 7\), got \(7,\) and \(3, 6\)"),
    (STEPS, {"keys": "keys"}, "keys must be a tensor, got str"),
    (STEPS, {"names": ["a"]}, "one entry for each of the 3 keys, got 1"),
    (BLOCK_MAP, {"query": torch.zeros(12)}, r"height, width\) with 12 values, got \(12,\) and \(3, 4\)"),
    (BLOCK_MAP, {"key": torch.zeros(4, 3)}, r"got \(3, 4\) and \(4, 3\)"),
    (BLOCK_MAP, {"resolution": 1}, "one of the 1 resolutions, got 1"),
    (BLOCK_MAP, {"base": "l1"}, "base must be one of dis, dot, got 'l1'"),
    ({}, {"source": nn.Linear(2, 2)}, "source must contain an AdaptiveSimilarity, got Linear without one"),
    ({}, {"source": None}, "source must be a module, got NoneType"),
    ({}, {"source": TWO_LAYERS, "ax": Figure().subplots()}, "one head and one resolution, got 2 layers with up to 3"),
]


@pytest.mark.parametrize(("arguments", "change", "message"), ERRORS)
def test_errors(arguments, change, message):
    functions = {"weights": plots.association_map, "keys": plots.footprint_steps, "key": plots.block_map}
    function = next((functions[name] for name in functions if name in arguments), plots.footprint_weights)
    with pytest.raises(ah.AHopError, match=message):
        function(**arguments | change)


@pytest.mark.parametrize("style", ["default", "dark_background"])
def test_text_and_lines_contrast_with_light_and_dark_backgrounds(model, style, tmp_path):
    with matplotlib.style.context(style):
        figure = plots.footprint_weights(model)
        figure.savefig(tmp_path / "picture.png")
    background = np.array(matplotlib.colors.to_rgb(figure.get_facecolor()))
    axis = figure.axes[0]
    for color in (axis.title.get_color(), *(line.get_color() for line in axis.lines)):
        assert np.abs(np.array(matplotlib.colors.to_rgb(color)) - background).max() > 0.3
