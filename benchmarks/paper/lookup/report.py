"""Tables of the lookup benchmark: mean and standard deviation over the seeds, the best network bold."""

from collections.abc import Sequence

from benchmarks.harness.report import bold_best, group, spread, table
from benchmarks.harness.rows import Row

KINDS = {"pixels": "pixels replaced", "block": "block covered"}


def _table(rows: Sequence[Row], *names: str) -> list[list[str]]:
    """Returns the lines of a table: the values of the columns ``names``, then a cell for each network."""
    networks = [name for (name,) in group(rows, "network")]
    lines = []
    for found, here in group(rows, *names).items():
        cells = group(here, "network")
        values = [[float(row["value"]) for row in cells.get((name,), [])] for name in networks]
        lines.append([*found, *bold_best([spread(each) for each in values])])
    return [[*[""] * len(names), *networks], *lines]


def face_table(rows: Sequence[Row]) -> str:
    """Accuracy of face classifiers by the kind and the fraction of damage."""
    header, *lines = _table([row for row in rows if row["part"] == "faces"], "damage", "measure")
    body = [[KINDS[kind], f"{100 * float(level):.0f} %", *cells] for kind, level, *cells in lines]
    return table(["damage", "share", *header[2:]], body)


def bag_table(rows: Sequence[Row]) -> str:
    """AUC of bag classifiers by the fraction of replaced pixels."""
    header, *lines = _table([row for row in rows if row["part"] == "bags"], "damage")
    body = [[f"{100 * float(kind.split()[1]):.0f} %", *cells] for kind, *cells in lines]
    return table(["pixels replaced", *header[1:]], body)


def report(rows: Sequence[Row]) -> str:
    """All tables that have rows."""
    shows = {"faces": face_table, "bags": bag_table}
    return "\n\n".join(show(rows) for part, show in shows.items() if any(row["part"] == part for row in rows))
