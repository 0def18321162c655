"""Tables and pictures of the small tables: scores, ranks, critical differences."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.stats import rankdata, studentized_range

from benchmarks.harness.report import GRAY, bold_best, drawing, group, table
from benchmarks.harness.rows import Row
from benchmarks.paper.tabular.rivals import ALONE, FOREST_NAME, LINEAR_NAME, MEMORY_NAME, RIVALS
from benchmarks.paper.tabular.tables import NAMES

SCORES = ("AUC", "R2")
Scores = dict[tuple[str, str], float]


def means(rows: Sequence[Row], *measures: str) -> Scores:
    """Means over the seeds, by table and model."""
    mine = [row for row in rows if row["measure"] in measures]
    return {
        (name, model): statistics.mean(float(row["value"]) for row in part)
        for (name, model), part in group(mine, "table", "model").items()
    }


def complete(scores: Scores, models: Sequence[str]) -> list[str]:
    """The tables on which all models were measured."""
    return [name for name in NAMES if all((name, model) in scores for model in models)]


def ranks(scores: Scores, models: Sequence[str]) -> dict[str, float]:
    """Mean rank of each model over the tables; 1 is best, and scores that are equal to four digits share a rank."""
    names = complete(scores, models)
    each = [rankdata([-round(scores[name, model], 4) for model in models]) for name in names]
    return dict(zip(models, np.mean(each, 0), strict=True))


def critical_difference(models: int, tables: int) -> float:
    """The difference of two mean ranks that is significant at 5 % in the test of Nemenyi."""
    quantile = studentized_range.ppf(0.95, models, math.inf) / math.sqrt(2)
    return float(quantile * math.sqrt(models * (models + 1) / (6 * tables)))


def report(rows: Sequence[Row]) -> str:
    """Scores of all tables, and mean ranks, calibration errors and times of all models; for defaults, then tuned."""
    parts = []
    for (tuned,), mine in group(rows, "tuned").items():
        models = [model for model in RIVALS if any(row["model"] == model for row in mine)]
        scores = means(mine, *SCORES)
        names = complete(scores, models)
        if not names:
            continue
        seeds = min(len({row["seed"] for row in part}) for part in group(mine, "table", "model").values())
        what = "default parameters" if tuned == "0" else f"the best of {tuned} parameter settings on three inner folds"
        caption = f"Mean over 5 folds and {seeds} seeds, with {what}: AUC for classes, R² for numbers."
        if seeds == 1:
            caption = f"Mean over 5 folds, with {what}: AUC for classes, R² for numbers."
        kinds = {row["table"]: row["measure"] for row in mine if row["measure"] in SCORES}
        body = [
            [
                name,
                {"AUC": "AUC", "R2": "R²"}[kinds[name]],
                *bold_best([f"{scores[name, model]:.4f}" for model in models]),
            ]
            for name in names
        ]
        parts += [caption, table(["table", "score", *models], body), _summary(mine, models, scores, names)]
    return "\n\n".join(parts)


def _summary(rows: Sequence[Row], models: Sequence[str], scores: Scores, names: Sequence[str]) -> str:
    compared = [model for model in models if model != ALONE]
    ranked = ranks(scores, compared)
    gaps, seconds = means(rows, "calibration error"), means(rows, "CPU seconds per fit")
    classes = [name for name in names if (name, models[0]) in gaps]
    best = {name: max(scores[name, LINEAR_NAME], scores[name, FOREST_NAME]) for name in names}
    body = []
    for model in models:
        times = [seconds[name, model] for name in names]
        body.append([
            model,
            f"{ranked[model]:.2f}" if model in ranked else "",
            f"{statistics.mean(gaps[name, model] for name in classes):.3f}" if classes else "",
            f"{min(scores[name, model] - best[name] for name in names):+.3f}",
            f"{statistics.median(times):.2f}",
            f"{max(times):.2f}",
        ])  # fmt: skip
    columns = list(zip(*body, strict=True))
    columns[1], columns[2] = bold_best(columns[1], min), bold_best(columns[2], min)
    header = ["model", "mean rank", "calibration error", "largest loss", "CPU seconds, median", "CPU seconds, maximum"]
    difference = critical_difference(len(compared), len(names))
    caption = (
        f"Mean rank over {len(names)} tables (1 is best; differences of {difference:.2f} are significant at 5 % by the"
        f" test of Nemenyi), expected calibration error over {len(classes)} tables, the largest loss against the better"
        f" one of {LINEAR_NAME} and {FOREST_NAME} on a table, and time of a fit on one core."
    )
    return f"{caption}\n\n{table(header, zip(*columns, strict=True))}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws mean ranks with default parameters; a bar joins models whose ranks do not differ significantly."""
    mine = [row for row in rows if row["tuned"] == "0" and row["model"] != ALONE]
    models = [model for model in RIVALS if any(row["model"] == model for row in mine)]
    scores = means(mine, *SCORES)
    ranked = sorted(ranks(scores, models).items(), key=lambda pair: pair[1])
    difference = critical_difference(len(models), len(complete(scores, models)))
    with drawing(path, (8, 0.45 * len(models) + 1.2)) as figure:
        axis = figure.subplots()
        axis.set(
            xlim=(0.8, len(models) + 0.2), ylim=(len(models) - 0.4, -1.2), xlabel="mean rank (1 is best)", yticks=[]
        )
        axis.spines["left"].set_visible(False)
        for place, (model, rank) in enumerate(ranked):
            own = model == MEMORY_NAME
            axis.plot(rank, place, "o", color="C1" if own else "C0")
            axis.annotate(f"{model}, {rank:.2f}", (rank, place), (8, -4), textcoords="offset points")
        axis.plot([1, 1 + difference], [-0.8, -0.8], color=GRAY, linewidth=3)
        axis.annotate("critical difference", (1 + difference, -0.8), (6, -4), textcoords="offset points")
        for line, (first, last) in enumerate(_cliques([rank for _, rank in ranked], difference)):
            height = last + 0.25 + 0.12 * line
            axis.plot([ranked[first][1], ranked[last][1]], [height, height], color=GRAY, linewidth=2)


def _cliques(ranked: Sequence[float], difference: float) -> list[tuple[int, int]]:
    """First and last place of the largest groups of models whose ranks differ by less than the critical difference."""
    ends = [max(j for j in range(len(ranked)) if ranked[j] - ranked[i] < difference) for i in range(len(ranked))]
    return [(i, end) for i, end in enumerate(ends) if end > i and (i == 0 or end > ends[i - 1])]
