"""The notebooks run from top to bottom, and their stored outputs match their code."""

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import matplotlib
import pytest

pytestmark = pytest.mark.slow
NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def stored_text(cell: dict) -> str:
    return "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")


def without_numbers(text: str) -> str:
    """Figures differ slightly between machines; the words around them do not."""
    return re.sub(r"\d+(\.\d+)?(e[-+]\d+)?", "#", text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs_and_prints_its_stored_output(path):
    matplotlib.use("agg")  # no window
    namespace: dict[str, object] = {}
    for number, cell in enumerate(code_cells(path), 1):
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{path.name} cell {number}", "exec"), namespace)
        assert without_numbers(printed.getvalue()) == without_numbers(stored_text(cell)), f"cell {number} is stale"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stored_from_one_run_without_errors(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
