"""Write the tables and pictures of the documentation from the rows in benchmarks/results/.

To run: python -m benchmarks.harness.pages (--help shows this, and writes nothing)

A page has places for tables, between ``<!-- made: NAME -->`` and ``<!-- end -->``. What stands there is replaced; the
rest of the page is written by hand. What has not been measured yet says so, with the command that would.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import kernels_report, packed
from benchmarks.harness.report import PICTURES, Row, group
from benchmarks.harness.rows import RESULTS, read
from benchmarks.paper.images import report as images_report
from benchmarks.paper.mil import report as mil_report
from benchmarks.paper.retrieval import measure as retrieval
from benchmarks.paper.retrieval import report as retrieval_report
from benchmarks.paper.tabular import report as tabular_report

DOCS = PICTURES.parent
PLACE = re.compile(r"(<!-- made: ([\w-]+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)

Show = Callable[[Sequence[Row]], str]


def rows_of(file: str, **wanted: str) -> list[Row]:
    """The rows of a file of results, or those with some values; none where it is not there."""
    return [row for row in read(RESULTS / file) if wanted.items() <= row.items()]


def retrieval_rows(table: str) -> list[Row]:
    """The rows of one table of the retrieval benchmark, of the runs in which every system was measured.

    They are those of one device, the one that has the most of them: figures of two are not compared.
    """
    wanted = retrieval.jobs(table, retrieval.Size(), images=True)
    machines = group(rows_of("retrieval.csv"), "device").values()
    found = max((retrieval.rows_of(wanted, rows) for rows in machines), key=len, default=[])
    places = group(found, "data", "patterns", "mask", "noise", "bias", "system").values()
    runs = set.intersection(*({row["run"] for row in place} for place in places)) if found else set()
    return [row for row in found if row["run"] in runs]


def packed_rows() -> list[Row]:
    """The rows of the packed benchmark at its own size; those of a trial are not shown."""
    return rows_of("packed.csv", **{name: str(size) for name, size in packed.SIZE.items()})


def part(command: str, rows: Sequence[Row], show: Show) -> str:
    """A table and below it what made it, where and when; or the command to measure what is missing."""
    if not rows:
        return f"Not measured yet. To measure it: `python -m benchmarks.{command}`."
    origins = []
    for (device, torch), mine in group(rows, "device", "torch").items():
        commits, dates = ([value for (value,) in group(mine, name)] for name in ("commit", "date"))
        origins.append(f"{device}, torch {torch}, commit {', '.join(commits)}, {', '.join(dates)}")
    where = "; ".join(origins)
    return f"{show(rows)}\n\n<small>Made by `python -m benchmarks.{command}`: {where}.</small>"


def by_device(command: str, rows: Sequence[Row], show: Show) -> str:
    """A table for each machine, each with its origin."""
    machines = group(rows, "device")
    if len(machines) < 2:
        return part(command, rows, show)
    return "\n\n".join(f"**{device}**\n\n{part(command, mine, show)}" for (device,), mine in machines.items())


def of_bags(show: Callable[[mil_report.Figures, Sequence[str]], str]) -> str:
    """A table of the bag benchmark."""
    rows = rows_of("mil.csv")
    return by_device("paper.mil run", rows, lambda mine: show(mil_report.arrange(mine), mil_report.data_sets(mine)))


def of_images(setup: str) -> str:
    """The tables of one set-up of the image benchmark."""
    rows = rows_of("images.csv", setup=setup)
    seeds = len({row["seed"] for row in rows}) or 1
    return part(f"paper.images {setup} --seeds {seeds}", rows, lambda mine: images_report.report(mine, [setup]))


def of_retrieval(table: str, show: Show) -> str:
    """A table of the retrieval benchmark."""
    rows = retrieval_rows(table)
    runs = len({row["run"] for row in rows})
    return part(f"paper.retrieval --table {table} --runs {runs}", rows, show)


def accuracy(rows: Sequence[Row]) -> str:
    """How often each memory finds the pattern."""
    return retrieval_report.level_table(rows, ["accuracy"])


def error(rows: Sequence[Row]) -> str:
    """How far what it reads is from the pattern; a limit is known for the accuracy alone."""
    return retrieval_report.level_table([row for row in rows if row["error"]], ["error"])


SHORT = ("M-Hop", "A-Hop", "A-Hop, debias", "A-Hop, debias, table", retrieval_report.LIMIT, retrieval_report.GUESSED)

TABLES: dict[str, Callable[[], str]] = {
    "kernels": lambda: by_device("kernels", rows_of("kernels.csv"), kernels_report.report),
    "throughput": lambda: of_images("throughput"),
    "timing": lambda: by_device(
        "paper.retrieval --table timing", rows_of("retrieval_timing.csv"), retrieval_report.timing_table
    ),
    "packed": lambda: part("packed", packed_rows(), packed.report),
    "retrieval": lambda: of_retrieval("accuracy", accuracy),
    "retrieval-short": lambda: of_retrieval(
        "accuracy", lambda rows: accuracy([row for row in rows if row["system"] in SHORT])
    ),
    "retrieval-error": lambda: of_retrieval("accuracy", error),
    "ablations": lambda: of_retrieval("ablations", accuracy),
    "mixtures": lambda: of_retrieval("figure", retrieval_report.figure_table),
    "bags": lambda: of_bags(mil_report.short_table),
    "bags-corrupted": lambda: of_bags(mil_report.corruption_table),
    "images": lambda: of_images("paper"),
    "images-corrupted": lambda: of_images("working"),
    "tabular": lambda: part("paper.tabular", rows_of("tabular.csv"), tabular_report.report),
}
"""What can stand at a place, by its name."""


class Picture(NamedTuple):
    """What a picture shows, the rows it is drawn from, and what draws it."""

    shows: str
    rows: Callable[[], list[Row]]
    draw: Callable[[Sequence[Row], Path], object]


DRAWN = {
    "kernels": Picture(
        "Bars: how many times faster than plain PyTorch each shape is scored, forward and with backward",
        lambda: rows_of("kernels.csv"),
        kernels_report.draw,
    ),
    "retrieval": Picture(
        "Accuracy of memories in twelve mixtures of masking, noise and bias",
        lambda: retrieval_rows("figure"),
        retrieval_report.draw,
    ),
    "mil": Picture(
        "AUC of seven poolings against the strength of masking, noise and bias",
        lambda: rows_of("mil.csv"),
        mil_report.draw,
    ),
    "images": Picture(
        "Test accuracy of a ViT against the strength of noise, masking and a bias of the colours",
        lambda: rows_of("images.csv", setup="working"),
        images_report.draw,
    ),
}
"""Pictures, by the name of their file; their place is NAME-picture."""


def at_place(name: str) -> str:
    """What stands at a place: a table, or a picture if there is something to draw."""
    if name in TABLES:
        return TABLES[name]()
    file = name.removesuffix("-picture")
    return f"![{DRAWN[file].shows}](pictures/{file}.svg)" if DRAWN[file].rows() else ""


def fill(page: str) -> str:
    """The page with every place filled anew."""
    return PLACE.sub(
        lambda place: f'{place[1]}<div class="wide" markdown>\n\n{at_place(place[2])}\n\n</div>\n{place[3]}', page
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the places of all pages, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    for path in sorted(DOCS.glob("*.md")):
        page = path.read_text()
        places = [name for _, name, _ in PLACE.findall(page)]
        if places:
            path.write_text(fill(page))
            print(f"{path.relative_to(DOCS.parent)}: {', '.join(places)}")
    for name, picture in DRAWN.items():
        rows = picture.rows()
        if rows:
            picture.draw(rows, PICTURES / f"{name}.svg")
            print(f"picture: docs/pictures/{name}.svg")


if __name__ == "__main__":
    main()
