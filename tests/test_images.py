"""ImageSimilarity, and memories of images: views, shifts, missing pixels, fits, files and explanations."""

import pytest
import torch

import ahop_layers as ah
from ahop_layers.memory.images import BEST_SHARE, CHANCE_SHARE, CONTRAST_START, PIXEL_START

SIDE = 12


@pytest.fixture(scope="module")
def images():
    """Images of six classes, four each: a smooth image under another light."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(6, 1, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, SIDE, mode="bilinear")[:, 0]
    slope = torch.linspace(0.3, 1.0, SIDE)
    light = torch.stack([slope.expand(SIDE, SIDE), slope.flip(0).expand(SIDE, SIDE), slope[:, None].expand(SIDE, SIDE)])
    lights = torch.cat([light, torch.ones(1, SIDE, SIDE)])
    return (smooth[:, None] * lights).flatten(0, 1), torch.arange(6).repeat_interleave(4)


@pytest.fixture(scope="module")
def rows(images):
    return images[0].flatten(1)


def fixed(rows, **options):
    """A similarity with the norms and widths of images."""
    return ah.ImageSimilarity(SIDE, SIDE, **options).fix_scales_(rows)


def patches(rows):
    """Centered patches of 4 x 4 pixels: ``(L, patches, 16)``."""
    cut = rows.reshape(-1, SIDE, SIDE).unfold(1, 4, 2).unfold(2, 4, 2).flatten(3).flatten(1, 2)
    return cut - cut.mean(-1, keepdim=True)


def test_the_first_score_is_that_of_the_best_patches_and_of_pixels_and_contrasts(rows):
    similarity, query, key = fixed(rows, sizes=(4,)), rows[:3], rows[5:9]
    constant = 1e-3 * patches(rows).norm(dim=-1).square().mean().sqrt()
    cut = patches(query), patches(key)
    first, second = (part / (part.norm(dim=-1, keepdim=True) + constant) for part in cut)
    correlation = torch.einsum("lpd,spd->lsp", first, second).sort(-1, descending=True).values
    expected = correlation[..., : round(BEST_SHARE * correlation.shape[-1])].mean(-1)
    views, others = similarity.views(query), similarity.views(key)
    for place, start, share in ((0, PIXEL_START / SIDE, CHANCE_SHARE), (1, CONTRAST_START, 0.0)):
        difference = (views[place][:, None] - others[place]).abs()  # of close pixels, and of rough contrasts
        values = (-difference / similarity.parts()[place].widths[1]).exp().sort(-1, descending=True).values
        expected += start * values[..., round(share * values.shape[-1]) :].sum(-1) / values.shape[-1]
    torch.testing.assert_close(similarity(query, key), expected, rtol=1e-4, atol=1e-4)


def test_brightness_and_contrast_do_not_matter_to_patches(rows):
    similarity = fixed(rows)
    brighter = zip(similarity.parts()[2:], similarity.views(rows)[2:], similarity.views(2 * rows + 1)[2:], strict=True)
    for part, own, other in brighter:
        torch.testing.assert_close(part(own, own), part(other, own), rtol=0.02, atol=0.01)


@pytest.mark.parametrize("shape", [(12, 12, 1), (7, 9, 3), (2, 2, 1), (1, 5, 1), (1, 1, 2)])
def test_any_size_and_number_of_channels_is_compared(shape):
    similarity = ah.ImageSimilarity(*shape)
    rows = torch.rand(5, similarity.dim)
    similarity.fix_scales_(rows)
    assert torch.equal(similarity(rows, rows).argmax(-1), torch.arange(5))


def test_the_best_of_all_shifts_counts(images, rows):
    plain, shifted = fixed(rows), fixed(rows, shifts=1)
    query = images[0][:4].roll((1, -1), (1, 2))
    query[:, 0], query[:, :, -1] = query[:, 1], query[:, :, -2]
    moved = [shifted(query.flatten(1), rows), plain(query.flatten(1), rows)]
    assert (moved[0] >= moved[1] - 1e-6).all()
    assert (moved[0].diagonal() > moved[1].diagonal()).all()
    assert (shifted(rows, rows).diagonal() >= plain(rows, rows).diagonal() - 1e-6).all()


def test_explanations_of_shifted_images_add_up_to_the_score(images):
    memory = ah.AssociativeMemory(images[0], ah.ImageSimilarity(SIDE, SIDE, shifts=1))
    query = images[0][:4].roll((1, -1), (1, 2))
    query[3, :5, :3] = torch.nan
    torch.testing.assert_close(memory.explain(query).sum((1, 2)), memory.search(query).scores[:, 0])


def test_a_memory_of_images_finds_covered_ones_before_and_after_a_fit(images, tmp_path):
    pytest.importorskip("safetensors", reason="memories are saved with safetensors")
    asked = torch.arange(len(images[0])) % 4 == 3  # one light is not stored
    (rows, labels), (query, wanted) = ([each[chosen] for each in images] for chosen in (~asked, asked))
    memory = ah.AssociativeMemory(rows, labels=labels)
    assert isinstance(memory.similarity, ah.ImageSimilarity)
    damage, wanted = ah.variants.Covered(0.5, SIDE, SIDE).bind(query.flatten(1)), wanted.repeat(16)
    query = torch.cat([damage(query.flatten(1), torch.Generator().manual_seed(seed)) for seed in range(16)])
    nearest = labels[torch.cdist(query, rows.flatten(1), p=1).argmin(-1)]
    accuracy, simple = ((found == wanted).float().mean() for found in (memory.classify(query), nearest))
    assert accuracy > max(0.9, simple + 0.05)
    report = dict(memory.fit(ah.variants.Covered((0.0, 0.6), SIDE, SIDE)).rows)
    assert report["learned"] > report["start"]
    hits = memory.search(query.reshape(-1, SIDE, SIDE), k=2)
    assert hits.confidence.shape == (96, 2)
    explained = memory.explain(query)
    assert explained.shape == (96, SIDE, SIDE)
    torch.testing.assert_close(explained.sum((1, 2)), hits[0][:, 0], rtol=1e-3, atol=1e-3)
    memory.save(tmp_path / "images.safetensors")
    loaded = ah.AssociativeMemory.load(tmp_path / "images.safetensors")
    assert repr(loaded.similarity) == repr(memory.similarity)
    assert torch.equal(loaded.search(query)[0], memory.search(query)[0])


def test_covered_parts_add_less_to_a_score_than_others(images):
    rows = images[0]
    memory = ah.AssociativeMemory(rows)
    query = rows.clone()
    query[:, :6] = torch.rand(len(rows), 6, SIDE, generator=torch.Generator().manual_seed(3))
    explained = memory.explain(query, index=torch.arange(len(rows)))
    assert (explained[:, :5].mean((1, 2)) < explained[:, 7:].mean((1, 2))).all()


def test_unknown_pixels_take_no_part(images, small_fit):
    rows = images[0]
    memory = ah.AssociativeMemory(rows)
    query = rows.clone()
    query[:, :5] = torch.nan
    assert (memory.recall(query) == torch.arange(len(rows))).float().mean() > 0.9
    alone = torch.full((SIDE, SIDE), torch.nan)
    alone[3, 3] = rows[0, 3, 3]  # no contrast and no patch
    assert memory.search(alone)[0].isfinite().all()
    few = ah.AssociativeMemory(rows[:16])
    report = few.fit([ah.variants.Covered(0.2, SIDE, SIDE), ah.variants.Missing(0.2)])
    assert dict(report.rows)["learned"] > 0.5


def test_a_state_dict_of_other_sizes_is_refused(rows):
    state = ah.AssociativeMemory(rows, ah.ImageSimilarity(SIDE, SIDE, sizes=(4,))).state_dict()
    with pytest.raises((ah.AHopError, RuntimeError)):
        ah.AssociativeMemory(rows, ah.ImageSimilarity(SIDE, SIDE, sizes=(6,))).load_state_dict(state)


def test_invalid_arguments_are_named():
    with pytest.raises(ah.AHopError, match="shifts must be an integer from 0 to 11, got 12"):
        ah.ImageSimilarity(SIDE, SIDE, shifts=12)
    with pytest.raises(ah.AHopError, match=r"images must have 1 \* 12 \* 12 = 144 values"):
        ah.ImageSimilarity(SIDE, SIDE)(torch.rand(1, 100), torch.rand(2, 100))
    with pytest.raises(ah.AHopError, match="size"):
        ah.ImageSimilarity(SIDE, SIDE, sizes=(0,))


def test_rectangles_have_their_share_and_cover_with_values_of_the_patterns():
    origin = torch.rand(300, 3 * 20 * 16)
    index, query = ah.variants.Covered(0.5, 20, 16, channels=3).sample(origin, 200, torch.Generator().manual_seed(0))
    changed = (query != origin[index]).unflatten(-1, (3, 20, 16))
    assert (changed[:, 0] == changed[:, 1]).float().mean() > 0.99
    assert 0.45 < changed.float().mean() < 0.55
    assert query.amin() >= 0
    assert query.amax() <= 1
    shapes = {(int(each[0].any(1).sum()), int(each[0].any(0).sum())) for each in changed}
    assert len(shapes) > 5
    assert ah.variants.Covered(0.0, 20, 16, 3)(origin).equal(origin)


def test_the_views_of_stored_images_are_kept_until_they_change(monkeypatch):
    images, query = torch.rand(20, 8, 8), torch.rand(3, 64)
    memory = ah.AssociativeMemory(images)

    def views():
        return memory._read().prepared

    scores, kept = memory.scores(query), views()
    torch.testing.assert_close(kept, memory.similarity.views(images.flatten(1)), rtol=0, atol=0)
    assert views() is kept
    torch.testing.assert_close(scores, memory.similarity(query, images.flatten(1)))
    memory.similarity.dark.mul_(2)
    assert views() is not kept
    torch.testing.assert_close(memory.scores(query), memory.similarity(query, images.flatten(1)))
    memory.add(torch.rand(1, 8, 8))
    assert {len(view) for view in views()} == {21}
    monkeypatch.setattr("ahop_layers.memory.state.PREPARED_ELEMENTS", 1000)
    memory.add(torch.rand(1, 8, 8))
    assert not views()
