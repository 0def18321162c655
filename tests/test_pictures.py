"""The explanatory pictures: with transparent backgrounds, and reproducible byte for byte."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import ahop_layers as ah

DOCS = Path(__file__).parents[1] / "docs"
spec = spec_from_file_location("pictures", DOCS / "pictures.py")  # the command, as a module
pictures = module_from_spec(spec)
spec.loader.exec_module(pictures)

pytestmark = pytest.mark.slow


@pytest.mark.full
def test_the_same_command_writes_the_same_bytes(tmp_path):
    for folder in ("first", "second"):
        pictures.main(["likelihoods", "--out", str(tmp_path / folder)])
    first, second = (path.read_bytes() for path in sorted(tmp_path.glob("*/likelihoods.svg")))
    assert first == second


@pytest.mark.full
@pytest.mark.parametrize(("make", "blocks"), [(pictures.example, None), (pictures.occluded_example, pictures.PATCHES)])
def test_examples_are_won_by_weights_and_lost_by_distance(make, blocks):
    query, keys, weights = make()
    curves = ah.footprint(query[None], keys, base="dis", blocks=blocks)[0]
    assert curves[0, -1] < curves[1, -1]
    assert curves[0] @ weights > curves[1] @ weights
