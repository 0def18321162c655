"""The table of adapted models."""

from collections.abc import Sequence

from benchmarks.harness.report import group, table
from benchmarks.harness.rows import Row

NEEDS = {"by hand": "`example=` and `by_hand=True`", "scaled_dot_product_attention": "`example=`", "": "nothing"}
"""Mechanism -> what a call of ``adapt_`` needs. The first that a model has counts."""


def report(rows: Sequence[Row]) -> str:
    """Returns a table of the models by library and by what ``adapt_`` needs, and one of those adapted in part."""
    body, rest = [], []
    for (library, version), mine in group(rows, "library", "version").items():
        found: dict[str, list[str]] = {}
        for row in sorted(mine, key=lambda row: row["family"].lower()):
            if row["coverage"] == "fully":
                found.setdefault(next(how for how in NEEDS if how in row["how"]), []).append(row["family"])
            else:
                share = f"{row['adapted']} of {row['of']}" if row["coverage"] == "partly" else "none"
                rest.append([f"{library}, {row['family']}", share, row["reasons"]])
        body += [[f"{library} {version}", NEEDS[how], ", ".join(found[how])] for how in reversed(NEEDS) if how in found]
    parts = [table(["library", "needs", "fully adapted"], body), table(["model", "adapted", "why not all"], rest)]
    return "\n\n".join(parts[: 1 + bool(rest)])
