"""The explanatory pictures: stored, legible on light and dark backgrounds, and reproducible byte for byte."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import ahop_layers as ah
from ahop_layers import plots
from benchmarks.harness.report import COLORS

DOCS = Path(__file__).parents[1] / "docs"
spec = spec_from_file_location("pictures", DOCS / "pictures.py")  # the command, as a module
pictures = module_from_spec(spec)
spec.loader.exec_module(pictures)

pytestmark = pytest.mark.slow


def luminance(color: str) -> float:
    """Relative luminance as WCAG defines it, from 0 to 1."""
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("background", ["#ffffff", "#1e2129"])  # a white page, and the dark theme of the site
def test_colors_have_the_contrast_that_wcag_asks_of_graphics(background):
    for color in {pictures.GRAY, pictures.ORIGIN, pictures.OTHER, *plots.COLORS.values(), *COLORS}:
        lighter, darker = sorted((luminance(color), luminance(background)), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 3.0, color


def test_the_same_command_writes_the_same_bytes(tmp_path):
    for folder in ("first", "second"):
        pictures.main(["likelihoods", "--out", str(tmp_path / folder)])
    first, second = (path.read_bytes() for path in sorted(tmp_path.glob("*/likelihoods.svg")))
    assert first == second


@pytest.mark.parametrize("name", [name for name in pictures.PICTURES if name.endswith(".svg")])
def test_svg_has_a_transparent_background_and_no_date(name):
    text = (DOCS / "pictures" / name).read_text()
    assert re.search(r'id="patch_1">\s*<path [^>]*style="fill: none', text)
    assert "<dc:date>" not in text


@pytest.mark.full
@pytest.mark.parametrize(("make", "blocks"), [(pictures.example, None), (pictures.occluded_example, pictures.PATCHES)])
def test_examples_are_won_by_weights_and_lost_by_distance(make, blocks):
    query, keys, weights = make()
    curves = ah.footprint(query[None], keys, base="dis", blocks=blocks)[0]
    assert curves[0, -1] < curves[1, -1]
    assert curves[0] @ weights > curves[1] @ weights


def test_unknown_picture_is_refused(capsys):
    with pytest.raises(SystemExit):
        pictures.main(["nothing"])
    assert "expected any of footprint, blocks, likelihoods, weights, maps, got nothing" in capsys.readouterr().err
