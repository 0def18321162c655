"""Tables of the tabular benchmark."""

import json
import statistics
from collections.abc import Sequence

from benchmarks.harness.report import bold_best, bold_best_in_columns, group, table
from benchmarks.harness.rows import Row
from benchmarks.paper.figures import TABULAR
from benchmarks.paper.tabular.models import MODELS, Parameters

AREA_SETS = ("bank", "purchase")  # fewer than a fifth of the rows are positive
TITLES = {"accuracy": "accuracy", "roc_auc": "ROC AUC"}


def best_trial(rows: Sequence[Row], trials: Sequence[Row]) -> Parameters | None:
    """Returns the parameters of the best trial, or None if a trial is not among the rows."""
    scores: dict[str, tuple[float, str]] = {}
    for row in rows:
        if row["measure"] == "cross-validation" and any(trial.items() <= row.items() for trial in trials):
            scores[row["number"]] = (float(row["value"]), row["chosen"])
    if len(scores) < len(trials):
        return None
    parameters: Parameters = json.loads(max(scores.values())[1])
    return parameters


def report(rows: Sequence[Row]) -> str:
    """A table for each data set and number of rows; the best model is bold."""
    parts = []
    for (name, settings), mine in group(rows, "set", "settings").items():
        main, other = ("roc_auc", "accuracy") if name in AREA_SETS else ("accuracy", "roc_auc")
        body = []
        for model in MODELS:
            cells = [row for row in mine if row["model"] == model]
            if any(row["kind"] == "run" for row in cells):
                devices = dict.fromkeys(row["device"] for row in cells)
                figures = _figures(cells, main, other, TABULAR.get(name, {}).get(model))
                body.append([model, *figures, ", ".join(devices)])
        if body:
            columns = [TITLES[main], "standard deviation", "paper", "minus paper", TITLES[other], "CPU seconds per run"]
            caption = f"Test results on {name}, {settings}."
            header = ["model", "trials", "runs", *columns, "measured on"]
            parts += [caption, table(header, bold_best_in_columns(body, {3: max, 7: max}))]
    return "\n\n".join(parts)


SHORT = ("M-Hop", "K2-Hop", "A-Hop", "Random Forest", "XGBoost", "XGBoost, categories", "HistGradientBoosting")
"""The models of the short table."""


def short(rows: Sequence[Row]) -> str:
    """Mean and standard deviation over the runs, a line for each data set, and the paper's A-Hop."""
    body = []
    for (name,), mine in group(rows, "set").items():
        main = "roc_auc" if name in AREA_SETS else "accuracy"
        cells = {model: _figures([row for row in mine if row["model"] == model], main, main, None) for model in SHORT}
        shown = [f"{cell[2]} ± {cell[3]}" for cell in cells.values()]
        body.append([f"{name}, {TITLES[main]}", *bold_best(shown), f"{TABULAR[name]['A-Hop']:.4f}"])
    return table(["data set", *SHORT, "A-Hop, paper"], body)


def _figures(cells: Sequence[Row], main: str, other: str, paper: float | None) -> list[str]:
    def values(measure: str, kind: str = "run") -> list[float]:
        return [float(row["value"]) for row in cells if row["measure"] == measure and row["kind"] == kind]

    scores, mean = values(main), statistics.mean(values(main))
    return [
        str(len(values("cross-validation", "trial"))),
        str(len(scores)),
        f"{mean:.4f}",
        f"{statistics.stdev(scores):.4f}" if len(scores) > 1 else "",
        "" if paper is None else f"{paper:.4f}",
        "" if paper is None else f"{mean - paper:+.4f}",
        f"{statistics.mean(values(other)):.4f}",
        f"{statistics.mean(values('CPU seconds')):.1f}",
    ]
