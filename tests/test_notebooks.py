"""Notebooks run from top to bottom, stored without outputs, which the docs workflow adds."""

import json
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"


spec = spec_from_file_location("execute", DOCS / "execute.py")
execute = module_from_spec(spec)
spec.loader.exec_module(execute)

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
