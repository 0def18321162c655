"""The explanatory pictures: stored, legible on light and dark backgrounds, and reproducible byte for byte."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import ahop_layers as ah

DOCS = Path(__file__).parents[1] / "docs"
spec = spec_from_file_location("pictures", DOCS / "pictures.py")  # the command, as a module
pictures = module_from_spec(spec)
spec.loader.exec_module(pictures)

pytestmark = pytest.mark.slow
BACKGROUNDS = ("#ffffff", "#1e2129")  # a white page, and the dark theme of the site


def luminance(color: str) -> float:
    """Relative luminance as WCAG defines it, from 0 to 1."""
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(color: str, background: str) -> float:
    lighter, darker = sorted((luminance(color), luminance(background)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_every_picture_is_stored():
    assert all((DOCS / "pictures" / name).is_file() for name in pictures.PICTURES)


def test_the_same_command_writes_the_same_bytes(tmp_path):
    for folder in ("first", "second"):
        pictures.main(["likelihoods", "--out", str(tmp_path / folder)])
    first, second = (path.read_bytes() for path in sorted(tmp_path.glob("*/likelihoods.svg")))
    assert first == second


def test_colors_are_legible_on_light_and_dark_backgrounds():
    for color in (pictures.GRAY, pictures.ORIGIN, pictures.OTHER):
        for background in BACKGROUNDS:
            assert contrast(color, background) >= 2.9, (color, background)
    assert min(contrast(pictures.GRAY, background) for background in BACKGROUNDS) >= 3.6  # most of the text


@pytest.mark.parametrize("name", [name for name in pictures.PICTURES if name.endswith(".svg")])
def test_svg_has_a_transparent_background_and_no_date(name):
    text = (DOCS / "pictures" / name).read_text()
    assert re.search(r'id="patch_1">\s*<path [^>]*style="fill: none', text)
    assert "<dc:date>" not in text


def test_example_is_won_by_weights_and_lost_by_distance():
    query, keys, weights = pictures.example()
    curves = ah.footprint(query[None], keys, base="dis")[0]
    assert curves[0, -1] < curves[1, -1]
    assert curves[0] @ weights > curves[1] @ weights


def test_occluded_example_is_won_by_blocks_and_lost_by_distance():
    query, keys, weights = pictures.occluded_example()
    curves = ah.footprint(query[None], keys, base="dis", blocks=ah.patches(8, 8, 2))[0]
    assert curves.shape == (2, 16)
    assert curves[0, -1] < curves[1, -1]
    assert curves[0] @ weights > curves[1] @ weights
    changed = (query != keys[0]).reshape(8, 8).nonzero()
    assert (changed.amax(0) - changed.amin(0) < 4).all()  # within a square of 4 x 4 pixels


def test_unknown_picture_is_refused(capsys):
    with pytest.raises(SystemExit):
        pictures.main(["nothing"])
    assert "expected any of footprint, blocks, likelihoods, weights, maps, got nothing" in capsys.readouterr().err
