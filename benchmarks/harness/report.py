"""What all reports share: tables in Markdown, and pictures for light pages and dark ones."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.rows import RESULTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, str]

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
GREY = "#82868c"  # as far from black as from white
COLOURS = (
    "#3a93b5",
    "#d98032",
    "#6a9a3b",
    "#c8555b",
    "#8d7cc3",
    "#a98a3f",
    "#d070a8",
)  # all about as light as the grey
STYLE = {
    "svg.fonttype": "none",  # text stays text: small, and compared by tests
    "svg.hashsalt": "ahop-layers",  # else a second run would name the parts of a picture anew
    "savefig.transparent": True,
    "font.family": "sans-serif",
    "grid.color": GREY,
    "grid.alpha": 0.3,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), GREY),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
}


def table(header: Sequence[object], body: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = (header, ["---"] * len(header), *body)
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def number(value: str | float) -> str:
    """Three digits of a number, and no exponent."""
    shown = f"{float(value):.3g}"
    return f"{float(shown):,.0f}" if "e+" in shown else shown


def group(rows: Iterable[Row], *names: str) -> dict[tuple[str, ...], list[Row]]:
    """Rows by the values of some columns, in the order in which these first appear."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def picture_for(output: Path, name: str) -> Path:
    """Where to draw rows: in the documentation if these are the benchmark's own, else beside them."""
    own = output.resolve() == (RESULTS / f"{name}.csv").resolve()
    return PICTURES / f"{name}.svg" if own else output.with_suffix(".png")


@contextmanager
def drawing(path: Path, size: tuple[float, float]) -> Iterator["Figure"]:
    """A figure of a size in inches, to draw on; at the end it is saved, as a whole or not at all."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**STYLE, "axes.prop_cycle": matplotlib.cycler(color=COLOURS)}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        form = path.suffix[1:]
        # The time of drawing would make every run's file another one.
        figure.savefig(part, format=form, dpi=130, metadata={"Date": None} if form == "svg" else None)
    os.replace(part, path)
