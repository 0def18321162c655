"""Tables of the tabular benchmark."""

import json
from collections.abc import Sequence

from benchmarks.harness.report import bold_best, group, spread, table
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


def report(rows: Sequence[Row], models: Sequence[str] = tuple(MODELS)) -> str:
    """Mean and standard deviation over the runs of the models: a line for each data set, and the paper's A-Hop."""
    runs = group((row for row in rows if row["kind"] == "run"), "set", "model", "measure")
    models = [model for model in models if any(model == found for _, found, _ in runs)]
    body = []
    for name in dict.fromkeys(name for name, _, _ in runs):
        measure = "roc_auc" if name in AREA_SETS else "accuracy"
        cells = [[float(row["value"]) for row in runs.get((name, model, measure), [])] for model in models]
        paper = TABULAR.get(name, {}).get("A-Hop")
        shown = bold_best([spread(values, 4) for values in cells])
        body.append([f"{name}, {TITLES[measure]}", *shown, f"{paper:.4f}" if paper else ""])
    return table(["data set", *models, "A-Hop, paper"], body)


SHORT = ("M-Hop", "K2-Hop", "A-Hop", "Random Forest", "XGBoost", "XGBoost, categories", "HistGradientBoosting")
"""The models that the page shows."""
