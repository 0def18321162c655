"""Notebooks run from top to bottom, stored without outputs, which the docs workflow adds; pictures are reproducible."""

import json
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from matplotlib.figure import Figure

import ahop_layers as ah

DOCS = Path(__file__).parents[1] / "docs"


def command(name: str) -> ModuleType:
    """Returns a command of the documentation as a module."""
    spec = spec_from_file_location(name, DOCS / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


execute, pictures = command("execute"), command("pictures")

pytestmark = pytest.mark.slow


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", execute.NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path, small_fit):
    cells = code_cells(path)
    assert not [cell for cell in cells if cell["outputs"]], "remove stored outputs: python docs/execute.py --clear"
    for cell in cells:  # a tenth of the training; the docs workflow runs all of it
        cell["source"] = re.sub(
            r"epochs=(\d+)", lambda number: f"epochs={int(number[1]) // 10 or 1}", "".join(cell["source"])
        )
    values = [value for _, value in execute.run_cells(cells, path.name)]
    assert len(values) == len(cells)
    assert any(isinstance(value, Figure) for value in values)


def test_the_command_stores_what_cells_print_and_return_and_removes_it(tmp_path):
    path = tmp_path / "one.ipynb"
    sources = ["from matplotlib.figure import Figure\nx = 2\nprint('x')\n", "Figure(figsize=(1, 2))", "x + 1"]
    cells = [{"cell_type": "code", "source": source.splitlines(keepends=True), "outputs": []} for source in sources]
    path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": ["title"]}, *cells]}))
    execute.main([str(path)])
    printed, drawn, returned = (cell["outputs"][0] for cell in code_cells(path))
    assert printed["text"] == ["x\n"]
    assert drawn["data"].keys() == {"image/png", "text/plain"}
    assert drawn["data"]["text/plain"] == ["<Figure size 100x200 with 0 Axes>"]
    assert returned["data"] == {"text/plain": ["3"]}
    execute.main([str(path), "--clear"])
    assert [(cell["outputs"], cell["execution_count"]) for cell in code_cells(path)] == [([], None)] * 3


@pytest.mark.full
def test_pictures_are_reproducible_and_their_examples_are_won_by_weights(tmp_path):
    for folder in ("first", "second"):
        pictures.main(["footprint", "--out", str(tmp_path / folder)])
    first, second = (path.read_bytes() for path in sorted(tmp_path.glob("*/footprint.svg")))
    assert first == second
    for make, blocks in ((pictures.example, None), (pictures.occluded_example, pictures.PATCHES)):
        query, keys, weights = make()
        curves = ah.footprint(query[None], keys, base="dis", blocks=blocks)[0]
        assert curves[0, -1] < curves[1, -1]  # lost by distance
        assert curves[0] @ weights > curves[1] @ weights
