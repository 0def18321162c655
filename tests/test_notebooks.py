"""The notebooks run from top to bottom, and their stored outputs are what their cells give."""

import json
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
spec = spec_from_file_location("execute", DOCS / "execute.py")  # the command, as a module
execute = module_from_spec(spec)
spec.loader.exec_module(execute)

pytestmark = pytest.mark.slow
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]\d+)?")
TOLERANCE = 0.03
"""Measured figures, such as accuracies of trained models, differ by less between processors. Integers do not differ."""


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def stored(cell: dict) -> tuple[str, list[str]]:
    """Returns what a cell has printed, and the texts of its results."""
    printed = "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")
    return printed, ["".join(output["data"]["text/plain"]) for output in cell["outputs"] if "data" in output]


def agree(text: str, expected: str) -> bool:
    """Whether two texts have the same words and integers, and other numbers within the tolerance."""
    pairs = list(zip(NUMBER.findall(text), NUMBER.findall(expected), strict=False))
    close = (one == two if (one + two).isdigit() else abs(float(one) - float(two)) <= TOLERANCE for one, two in pairs)
    return NUMBER.sub("#", text) == NUMBER.sub("#", expected) and all(close)


@pytest.mark.parametrize("path", execute.NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_gives_its_stored_output(path):
    cells = code_cells(path)
    for number, (cell, (printed, value)) in enumerate(zip(cells, execute.run_cells(cells, path.name), strict=True), 1):
        text, results = stored(cell)
        stale = f"cell {number} is stale: run docs/execute.py"
        assert agree(printed, text), f"{stale}: expected {printed!r}, stored {text!r}"
        assert results == ([] if value is None else [execute.described(value)]), stale
        drawn = ["image/png" in output["data"] for output in cell["outputs"] if "data" in output]
        assert drawn == [isinstance(value, Figure)] * len(results), stale


@pytest.mark.parametrize("path", execute.NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stored_from_one_run_without_errors(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]


def test_a_stale_figure_is_noticed():
    assert agree("accuracy 0.712\n", "accuracy 0.690\n")
    assert agree("change 5.7e-06", "change 6.1e-06")
    assert not agree("dot product (M-Hop)  0.300\n", "dot product (M-Hop)  0.360\n")
    assert not agree("adapted 2 of 2", "adapted 3 of 3")
    assert not agree("accuracy 0.7", "error 0.7")
    assert not agree("accuracy 0.7", "accuracy 0.7\naccuracy 0.7")


def test_the_command_stores_what_cells_print_and_return(tmp_path):
    path = tmp_path / "one.ipynb"
    sources = ["from matplotlib.figure import Figure\nx = 2\nprint('x')\n", "Figure(figsize=(1, 2))", "x + 1"]
    cells = [{"cell_type": "code", "source": source.splitlines(keepends=True), "outputs": []} for source in sources]
    path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": ["title"]}, *cells]}))
    execute.main([str(path)])
    assert [stored(cell) for cell in code_cells(path)] == [
        ("x\n", []),
        ("", ["<Figure size 100x200 with 0 Axes>"]),
        ("", ["3"]),
    ]
    assert "image/png" in code_cells(path)[1]["outputs"][0]["data"]
