"""The measurements of the tabular benchmark: cross-validated trials, then runs of the best trial on the test part."""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from sklearn.metrics import accuracy_score, roc_auc_score
from sklearn.model_selection import StratifiedKFold, cross_val_score

from benchmarks.harness.command import explain_missing_data
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

    @property
    def key(self) -> Row:
        """The columns that identify its rows."""
        rows = "all rows" if self.rows is None else f"{self.rows} rows"
        return {"set": self.set, "settings": rows, "model": self.model, "kind": self.kind, "number": str(self.number)}


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
    """Yields the trials, or the runs of models whose trials are complete, that the results do not have yet."""
    for model in options.models:
        here = (name, options.rows, model)
        where = (options.data_dir, options.device)
        quick = MODELS[model].quick if options.quick else {}
        drawn = [{**MODELS[model].draw(number), **quick} for number in range(options.trials)]
        wanted = [Evaluation(*here, "trial", number, chosen, *where) for number, chosen in enumerate(drawn)]
        if kind == "run":
            best = best_trial(results.rows, [trial.key for trial in wanted])
            runs = range(options.runs) if best is not None else ()
            wanted = [Evaluation(*here, "run", number, best, *where) for number in runs]
        yield from (each for each in wanted if not results.has(each.key))


def run(options: argparse.Namespace, results: ResultTable) -> None:
    """Measures what is missing, data set by data set, first the trials and then the runs, until the time is up."""
    deadline = time.monotonic() + 60 * options.minutes
    with explain_missing_data():
        for name in options.sets:
            if any(any(missing_evaluations(results, options, name, kind)) for kind in KINDS):
                files_of(name, options.data_dir)  # reports missing files before any process starts
    # Processes are spawned: a forked process cannot use CUDA, and inherits the thread pools of the libraries.
    with ProcessPoolExecutor(options.processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for name in options.sets:
            for kind in KINDS:
                missing = list(missing_evaluations(results, options, name, kind))
                futures = {pool.submit(measure, each): each for each in missing}
                for done, future in enumerate(as_completed(futures), 1):
                    if future.cancelled():
                        continue
                    each, measured = futures[future], future.result()
                    results.add_figures({**each.key, "chosen": json.dumps(each.chosen)}, measured)
                    figures = ", ".join(f"{name} {value:.4f}" for name, value in measured.items())
                    print(f"{name}: {kind} {done}/{len(missing)}, {each.model} {each.number}: {figures}", flush=True)
                    if time.monotonic() > deadline:
                        for other in futures:
                            other.cancel()
                if time.monotonic() > deadline:
                    print(f"stopped after {options.minutes:g} minutes; the same command resumes here")
                    return


class Keyed(Protocol):
    """A measurement with the columns that identify its rows."""

    @property
    def key(self) -> Row:
        """The columns."""


def measure_missing(
    wanted: Sequence[Keyed],
    measure: Callable[[Any], dict[str, float]],
    results: ResultTable,
    options: argparse.Namespace,
) -> None:
    """Measures what the results do not have yet in parallel processes with one thread each, until the time is up."""
    deadline = time.monotonic() + 60 * options.minutes
    missing = [each for each in wanted if not results.has(each.key)]
    with ProcessPoolExecutor(options.processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        futures = {pool.submit(measure, each): each for each in missing}
        for done, future in enumerate(as_completed(futures), 1):
            if future.cancelled():
                continue
            each, measured = futures[future], future.result()
            results.add_figures(each.key, measured)
            figures = ", ".join(f"{name} {value:.4f}" for name, value in measured.items())
            print(f"{done}/{len(missing)}: {', '.join(each.key.values())}: {figures}", flush=True)
            if time.monotonic() > deadline:
                for other in futures:
                    other.cancel()
    if time.monotonic() > deadline:
        print(f"stopped after {options.minutes:g} minutes; the same command resumes here")
