"""Tables of the benchmark of vision transformers."""

import re
from collections.abc import Sequence

from benchmarks.harness.report import bold_best_in_columns, group, number, table
from benchmarks.harness.rows import Row

COLUMNS = [(label, part) for label in ("training", "inference") for part in ("eager", "compiled")]
Cells = dict[tuple[str, str], Row]


def _arrange(rows: Sequence[Row]) -> dict[tuple[str, ...], Cells]:
    """Returns (model, settings, attention) -> (pass, part) -> row."""
    groups = group(rows, "model", "settings", "attention")
    return {key: {(row["pass"], row["part"]): row for row in mine} for key, mine in groups.items()}


def _name(model: str, settings: str) -> str:
    return f"ViT-{model.partition('-')[0]}, {settings}"


def _table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Returns a table without empty columns."""
    kept = [index for index in range(len(header)) if any(line[index] for line in body)]
    return table([header[index] for index in kept], [[line[index] for index in kept] for line in body])


def shares(rows: Sequence[Row], mark: bool = False) -> str:
    """Images per second and peak memory in training, relative to the fused dot product in the same run.

    With ``mark``, the fastest of the attentions that adapt all layers of a model is bold.
    """
    body = []
    for (model, settings, attention), cells in _arrange(rows).items():
        if attention == "dot":
            continue
        line = [_name(model, settings), attention]
        for column, figure in [*((column, "images/s") for column in COLUMNS), (("training", "eager"), "MB")]:
            row = cells.get(column)
            line.append(f"{float(row[figure]) / float(row[f'sdpa {figure}']):.2f}" if row and row[figure] else "")
        body.append(line)
    if mark:
        body = [line for model in dict.fromkeys(line[0] for line in body) for line in _marked(body, model)]
    labels = [f"{label}, {part}" for label, part in COLUMNS]
    return _table(["model", "attention", *labels, "peak memory, training"], body)


def _marked(body: Sequence[list[str]], model: str) -> list[list[str]]:
    """Returns the lines of a model; the best of several attentions that adapt all layers is bold."""
    mine = [line for line in body if line[0] == model]
    whole = [line for line in mine if not line[1].startswith("last")]
    several = [index for index in range(2, 2 + len(COLUMNS)) if sum(bool(line[index]) for line in whole) > 1]
    return bold_best_in_columns(whole, dict.fromkeys(several, max)) + [line for line in mine if line not in whole]


def baselines(rows: Sequence[Row]) -> str:
    """Images per second and peak memory of the fused dot product."""
    body = []
    for (model, settings, attention), cells in _arrange(rows).items():
        if attention == "dot":
            speeds = [f"{float(cells[column]['images/s']):,.0f}" if column in cells else "" for column in COLUMNS]
            used = cells.get(("training", "eager"), {}).get("MB")
            body.append([_name(model, settings), *speeds, f"{float(used):,.0f}" if used else ""])
    labels = [f"{label}, {part}, images/s" for label, part in COLUMNS]
    return _table(["model", *labels, "peak memory, training, MB"], body)


def report(rows: Sequence[Row]) -> str:
    """The relative and the absolute figures of all models."""
    caption = "The fused dot product (`scaled_dot_product_attention`) itself:"
    return f"{shares(rows, mark=True)}\n\n{caption}\n\n{baselines(rows)}"


def of_attention(rows: Sequence[Row]) -> str:
    """Milliseconds of one attention without projections, and its time relative to the fused dot product."""
    labels, body = list(dict.fromkeys(row["pass"] for row in rows)), []
    for (attention,), mine in group(rows, "attention").items():
        cells = {row["pass"]: row for row in mine}
        body.append([attention, *(cell for label in labels for cell in _times(cells.get(label)))])
    header = [f"{label}, {unit}" for label in labels for unit in ("ms", "relative")]
    best = {1 + 2 * place: min for place in range(len(labels))}
    return _table(["attention", *header], bold_best_in_columns(body, best))


def _times(row: Row | None) -> tuple[str, str]:
    if row is None:
        return "", ""
    seconds = float(row["seconds"])
    return number(1e3 * seconds), f"{seconds / float(row['sdpa seconds']):.2f}"


def of_memory(rows: Sequence[Row]) -> str:
    """Peak memory of one layer by sequence length, and its range over the lengths."""
    body, lengths = [], list(dict.fromkeys(row["settings"] for row in rows))
    for (attention,), mine in group(rows, "attention").items():
        used = {row["settings"]: float(row["MB"]) for row in mine}
        smallest = min(used.values())  # 0 where a process reuses memory that it has
        ratio = f"{max(used.values()) / smallest:.3f}" if smallest else ""
        body.append([attention, *(f"{used[each]:,.1f}" if each in used else "" for each in lengths), ratio])
    names = [f"{re.sub('^.*, ', '', each)}, MB" for each in lengths]
    best = dict.fromkeys(range(1, 1 + len(lengths)), min)
    return _table(["attention", *names, "largest / smallest"], bold_best_in_columns(body, best))
