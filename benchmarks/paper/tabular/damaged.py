"""Damaged tables: scores on test rows some of whose cells are missing or wrong.

To run: python -m benchmarks.paper.tabular damaged [--tables glass hitters] [--models XGBoost] [--folds 5]
                                                   [--processes 2] [--minutes 30] [--report]

A missing cell has no value; a wrong cell has the value of another training row. Models are trained on clean rows, or on
damaged rows: for the adaptive memory ``damage=0.35``, for the others a damaged copy of the training set is appended, in
each row of which a random fraction of up to 0.7 of the cells is damaged in the same way as in the test rows. Rows are
stored in benchmarks/results/tabular_damaged.csv, and the same command resumes.
"""

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from benchmarks.harness.command import make_parser
from benchmarks.harness.report import COLORS, bold_best, drawing, group, table
from benchmarks.harness.rows import RESULTS, ResultTable, Row
from benchmarks.paper.tabular.models import available
from benchmarks.paper.tabular.pool import add_pool_options, make_pool
from benchmarks.paper.tabular.rivals import ALONE, MEMORY_NAME, RIVALS
from benchmarks.paper.tabular.small import fit, folds, predict, score
from benchmarks.paper.tabular.tables import NAMES, Table, load

if TYPE_CHECKING:
    import pandas as pd

LEVELS = (0.0, 0.1, 0.3, 0.5, 0.7)
KINDS = ("missing", "wrong")
TRAININGS = ("clean", "damaged")
MODELS = [name for name in RIVALS if name != ALONE]
DAMAGE = 0.35  # mean of the damage of the training rows


class Evaluation(NamedTuple):
    """A model on a fold of a table, trained on clean or on damaged rows."""

    table: str
    model: str
    training: str
    fold: int

    @property
    def key(self) -> Row:
        """The columns that identify its rows, which are all columns but the figures."""
        return {name: str(value) for name, value in self._asdict().items()}

    columns = key


def damage(
    X: "pd.DataFrame", source: "pd.DataFrame", kind: str, level: np.ndarray, random: np.random.Generator
) -> "pd.DataFrame":
    """Returns a copy with damaged cells; wrong cells have values of random rows of ``source``.

    Args:
        X: rows.
        source: rows with the same columns.
        kind: of ``KINDS``.
        level: fraction of the cells of each row ``(n,)``.
        random: source of random numbers.
    """
    result = X.copy()
    for name in X:
        hit = random.random(len(X)) < level
        other = source[name].iloc[random.integers(len(source), size=len(X))]
        other.index = X.index
        if kind == "missing":
            numeric = X[name].dtype.kind in "biuf"
            result[name] = (X[name].astype(float) if numeric else X[name]).mask(hit)
        else:
            result[name] = X[name].where(~hit, other)
    return result


def measure(wanted: Evaluation) -> dict[str, float]:
    """Fits a model and tests it with both kinds of damage and every fraction of damaged cells."""
    import pandas as pd

    warnings.simplefilter("ignore")
    data = load(wanted.table)
    training, test = folds(data, np.arange(len(data.y)), 5, 0)[wanted.fold]
    clean = data.X.iloc[training]
    fitted, found = None, {}
    for kind in KINDS:
        random = np.random.default_rng(wanted.fold)
        queries = [damage(data.X.iloc[test], clean, kind, np.full(len(test), level), random) for level in LEVELS]
        own = wanted.training == "damaged" and wanted.model == MEMORY_NAME
        if fitted is None or not (own or wanted.training == "clean"):  # these fits are the same for both kinds
            used = Table(clean, data.y[training], data.classes)
            if wanted.training == "damaged" and not own:
                copy = damage(clean, clean, kind, random.uniform(0, 2 * DAMAGE, len(clean)), random)
                used = Table(pd.concat([clean, copy], ignore_index=True), np.tile(used.y, 2), data.classes)
            fitted = fit(wanted.model, used, np.arange(len(used.y)), 0, {"damage": DAMAGE} if own else {})
        for level, rows in zip(LEVELS, queries, strict=True):
            tested = Table(rows.reset_index(drop=True), data.y[test], data.classes)
            everything = np.arange(len(test))
            predicted = predict(fitted, tested, everything)
            found[f"{kind} {data.measure} {level:g}"] = score(tested, everything, predicted)
    return found


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser("paper.tabular damaged", __doc__)
    add = parser.add_argument
    add("--tables", nargs="+", choices=NAMES, default=list(NAMES), help="tables (default: all)")
    add("--models", nargs="+", choices=MODELS, default=MODELS, help="models (default: all)")
    add("--folds", type=int, choices=range(1, 6), default=5, help="number of folds to test (default: %(default)s)")
    add_pool_options(parser)
    add("--output", type=Path, default=RESULTS / "tabular_damaged.csv", help="CSV file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Measures what is missing, then prints the tables."""
    options = parse(arguments)
    torch.set_num_threads(1)
    results = ResultTable(options.output, None if options.report else "cpu")
    if not options.report:
        models = available(options.models)
        wanted = [
            Evaluation(name, model, training, fold)
            for fold in range(options.folds)
            for name in options.tables
            for model in models
            for training in TRAININGS
        ]
        with make_pool(options) as pool:
            pool.measure(wanted, measure, results)
    print(report(results.rows))


def report(rows: Sequence[Row]) -> str:
    """A table for each kind of damage and each measure: mean scores over the tables, for every fraction."""
    parts = []
    for kind in KINDS:
        for name, shown in (("AUC", "AUC"), ("R2", "R²")):
            curves, tables, count = arrange(rows, kind, name)
            if not curves:
                continue
            body = [
                [model, training, *(f"{value:.3f}" for value in values)] for (model, training), values in curves.items()
            ]
            columns = [list(column) for column in zip(*body, strict=True)]
            columns[2:] = [bold_best(column) for column in columns[2:]]
            header = ["model", "training rows", *(f"{level:.0%}" for level in LEVELS)]
            caption = (
                f"Mean {shown} over {tables} tables and {count} folds, by the fraction of {kind} cells of a test row."
            )
            parts += [caption, table(header, zip(*columns, strict=True))]
    return "\n\n".join(parts)


def arrange(rows: Sequence[Row], kind: str, measure: str) -> tuple[dict[tuple[str, str], list[float]], int, int]:
    """Mean scores for every fraction, by model and training, over the tables and folds on which all were measured.

    A negative R2 counts as 0, the score of the mean.

    Returns:
        The scores, the number of tables and the largest number of folds.
    """
    mine = [row for row in rows if row["measure"].startswith(f"{kind} {measure} ")]
    places = [{(row["table"], row["fold"]) for row in part} for part in group(mine, "model", "training").values()]
    common = set.intersection(*places) if len(places) == len(MODELS) * len(TRAININGS) else set()
    curves: dict[tuple[str, str], list[float]] = {}
    for model in MODELS:
        for training in TRAININGS:
            values = {
                (row["table"], row["fold"], row["measure"]): max(float(row["value"]), 0.0)
                for row in mine
                if row["model"] == model and row["training"] == training
            }
            if common:
                curves[model, training] = [
                    float(np.mean([values[name, fold, f"{kind} {measure} {level:g}"] for name, fold in common]))
                    for level in LEVELS
                ]
    return curves, len({name for name, _ in common}), len({fold for _, fold in common})


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws the scores against the fraction of damaged cells; lines of models trained on damaged rows are dashed."""
    with drawing(path, (10, 8)) as figure:
        axes = figure.subplots(2, 2, sharex=True)
        for line, (measure, shown) in zip(axes, (("AUC", "mean AUC"), ("R2", "mean R²")), strict=True):
            for axis, kind in zip(line, KINDS, strict=True):
                curves, _, _ = arrange(rows, kind, measure)
                for (model, training), values in curves.items():
                    own = model == MEMORY_NAME
                    axis.plot(
                        LEVELS, values, "-" if training == "clean" else "--", color=COLORS[MODELS.index(model)],
                        linewidth=2.5 if own else 1.2, label=model if training == "clean" else None,
                    )  # fmt: skip
                axis.set(title=f"{kind} cells", xlabel="fraction of cells", ylabel=shown)
                axis.grid(visible=True)
        axes[0][0].plot([], [], "--", color="gray", label="trained on damaged rows")
        axes[0][0].legend(fontsize="small", frameon=False)
