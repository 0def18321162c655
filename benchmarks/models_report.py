"""The tables of adapted models."""

from collections.abc import Sequence

from benchmarks.harness.report import group, table
from benchmarks.harness.rows import Row

HOW = {"converter": "converter", "scaled_dot_product_attention": "its call", "by hand": "by hand"}


def report(rows: Sequence[Row]) -> str:
    """Returns one table for each library: each model that was run, what was adapted, and what changed."""
    parts = []
    for (library, version), mine in group(rows, "library", "version").items():
        body = [
            [row["family"] + (f" (`{row['model']}`)" if row["model"] else ""), _adapted(row), _how(row), row["change"],
             row["one_graph"]]
            for row in sorted(mine, key=lambda row: row["family"].lower())
        ]  # fmt: skip
        header = ["architecture", "adapted", "how", "largest change of an output", "one graph"]
        parts.append(f"### {library} {version}\n\n{table(header, body)}")
    return "\n\n".join(parts)


def _adapted(row: Row) -> str:
    counted = f" {row['adapted']} of {row['of']}" if row["coverage"] == "partly" else ""
    return row["coverage"] + counted + (f": {row['reasons']}" if row["reasons"] else "")


def _how(row: Row) -> str:
    return ", ".join(HOW[how] for how in row["how"].split(", ") if how)


def of_names(rows: Sequence[Row]) -> str:
    """Returns the number of models of timm that are adapted fully, partly and not, by family."""
    body = [[f"`{family}`", *_counts(mine)] for (family,), mine in group(rows, "family").items()]
    total = ["**all**", *(f"**{count}**" for count in _counts(rows))]
    return table(["family", "names with attention", "fully", "partly", "not"], [*body, total])


def _counts(rows: Sequence[Row]) -> list[int]:
    return [len(rows), *(sum(row["coverage"] == kind for row in rows) for kind in ("fully", "partly", "not"))]
