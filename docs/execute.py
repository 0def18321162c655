"""Executes the notebooks and stores their outputs, or removes them.

To run: python docs/execute.py   (or: python docs/execute.py docs/notebooks/memory.ipynb)

The notebooks of the repository have no outputs. The docs workflow stores them before it builds the site, and
``python docs/execute.py --clear`` removes them again.

A cell is compiled and run as Jupyter does: what it prints is a stream output, and the value of its last line is its
result. Figures are stored as PNG. Jupyter itself is not needed.
"""

import argparse
import ast
import base64
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

NOTEBOOKS = sorted((Path(__file__).parent / "notebooks").glob("*.ipynb"))


def run_cells(cells: Sequence[dict[str, Any]], name: str) -> Iterator[tuple[str, object]]:
    """Runs code cells in one namespace, and yields for each what it prints and the value of its last line, or None."""
    matplotlib.use("agg")  # no window
    namespace: dict[str, object] = {}
    for number, cell in enumerate(cells, 1):
        file, tree = f"{name} cell {number}", ast.parse("".join(cell["source"]))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        printed, value = io.StringIO(), None
        with redirect_stdout(printed):
            exec(compile(tree, file, "exec"), namespace)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), file, "eval"), namespace)
        yield printed.getvalue(), value


def described(value: object) -> str:
    """Returns the text of a result: its ``repr``, for a figure its size and number of axes."""
    if not isinstance(value, Figure):
        return repr(value)
    return f"<Figure size {value.bbox.width:.0f}x{value.bbox.height:.0f} with {len(value.axes)} Axes>"


def _outputs(printed: str, value: object, number: int) -> list[dict[str, Any]]:
    """Returns the outputs of a cell in the format of a notebook."""
    outputs: list[dict[str, Any]] = []
    if printed:
        outputs.append({"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)})
    if value is not None:
        data: dict[str, Any] = {"text/plain": [described(value)]}
        if isinstance(value, Figure):
            buffer = io.BytesIO()
            value.savefig(buffer, format="png", dpi=100, bbox_inches="tight", metadata={"Software": None})
            data = {"image/png": base64.b64encode(buffer.getvalue()).decode(), **data}
        outputs.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return outputs


def main(arguments: Sequence[str] | None = None) -> None:
    """Executes or clears notebooks in place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, default=NOTEBOOKS, help="files (default: all notebooks)")
    parser.add_argument("--clear", action="store_true", help="remove the outputs instead")
    given = parser.parse_args(arguments)
    for path in given.notebooks:
        notebook = json.loads(path.read_text())
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        if given.clear:
            for cell in code:
                cell["outputs"], cell["execution_count"] = [], None
        else:
            for number, (cell, result) in enumerate(zip(code, run_cells(code, path.name), strict=True), 1):
                cell["outputs"], cell["execution_count"] = _outputs(*result, number), number
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        print(path)


if __name__ == "__main__":
    main()
