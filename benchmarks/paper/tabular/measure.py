"""The measurements of the tabular benchmark: cross-validated trials, then runs of the best trial on the test part."""

import argparse
import json
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from sklearn.metrics import accuracy_score, roc_auc_score
from sklearn.model_selection import StratifiedKFold, cross_val_score

from benchmarks.harness.command import explain_missing_data
from benchmarks.harness.pool import make_pool
from benchmarks.harness.rows import ResultTable, Row
from benchmarks.paper.tabular.data import Split, files_of, load
from benchmarks.paper.tabular.models import MODELS, Context, Parameters
from benchmarks.paper.tabular.report import best_trial

SPLIT_SEED = 0
KINDS = ("trial", "run")


class Evaluation(NamedTuple):
    """A trial, with the parameters ``chosen`` at random, or a run, with those of the best trial."""

    set: str
    rows: int | None
    model: str
    kind: str
    number: int
    chosen: Parameters
    folder: Path
    device: str
    tuned: bool

    @property
    def key(self) -> Row:
        """The columns that identify its rows."""
        rows = "all rows" if self.rows is None else f"{self.rows} rows"
        settings = rows if self.tuned else f"{rows}, default parameters"
        number = str(self.number)
        return {"set": self.set, "settings": settings, "model": self.model, "kind": self.kind, "number": number}

    @property
    def columns(self) -> Row:
        """All columns of its rows but the figures."""
        return {**self.key, "chosen": json.dumps(self.chosen)}


@lru_cache(maxsize=1)
def split_of(name: str, folder: Path, rows: int | None) -> Split:
    """Reads a data set, once per process until another one is read."""
    return load(name, folder, SPLIT_SEED, rows)


def measure(wanted: Evaluation) -> dict[str, float]:
    """Cross-validates a trial, or fits and tests a run."""
    start = time.process_time()
    split = split_of(wanted.set, wanted.folder, wanted.rows)
    seed = wanted.number if wanted.kind == "run" else SPLIT_SEED
    model = MODELS[wanted.model].build(wanted.chosen, Context(seed, wanted.device, split.categories))
    if wanted.kind == "trial":
        folds = StratifiedKFold(5, shuffle=True, random_state=SPLIT_SEED)
        scores = cross_val_score(model, split.X, split.y, cv=folds, scoring=split.measure, error_score="raise")
        measured = {"cross-validation": scores.mean()}
    else:
        model.fit(split.X, split.y)
        probability = model.predict_proba(split.test_X)[:, 1]
        measured = {
            "accuracy": accuracy_score(split.test_y, probability > 0.5),
            "roc_auc": roc_auc_score(split.test_y, probability),
        }
    return {**measured, "CPU seconds": time.process_time() - start}


def missing_evaluations(
    results: ResultTable, options: argparse.Namespace, name: str, kind: str
) -> Iterator[Evaluation]:
    """Yields the trials, or the runs of models whose trials are complete, that the results do not have yet.

    Without trials, runs have default parameters.
    """
    for model in options.models:
        here = (name, options.rows, model)
        where = (options.data_dir, options.device, options.trials > 0)
        quick = MODELS[model].quick if options.quick else {}
        drawn = [{**MODELS[model].draw(number), **quick} for number in range(options.trials)]
        wanted = [Evaluation(*here, "trial", number, chosen, *where) for number, chosen in enumerate(drawn)]
        if kind == "run":
            best = best_trial(results.rows, [trial.key for trial in wanted]) if wanted else quick
            runs = range(options.runs) if best is not None else ()
            wanted = [Evaluation(*here, "run", number, best, *where) for number in runs]
        yield from (each for each in wanted if not results.has(each.key))


def run(options: argparse.Namespace, results: ResultTable) -> None:
    """Measures what is missing, data set by data set, first the trials and then the runs, until the time is up."""
    with explain_missing_data():
        for name in options.sets:
            if any(any(missing_evaluations(results, options, name, kind)) for kind in KINDS):
                files_of(name, options.data_dir)  # reports missing files before any process starts
    with make_pool(options) as pool:
        for name in options.sets:
            for kind in KINDS:
                missing = list(missing_evaluations(results, options, name, kind))
                done = 0
                for done, (each, figures) in enumerate(pool.figures(missing, measure), 1):
                    results.add_figures(each.columns, figures)
                    shown = ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
                    print(f"{done}/{len(missing)}: {', '.join(each.key.values())}: {shown}", flush=True)
                if done < len(missing):
                    return
