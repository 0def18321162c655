"""Memories for tables beside trees: the paper's five data sets, every model tuned with the same effort.

To run: python -m benchmarks.paper.tabular [--sets adult heart] [--models A-Hop] [--trials 10] [--processes 2]
                                           [--minutes 30] [--rows 5000] [--device cuda] [--report] [--quick]

One training and one test part for each set: Adult's are published, of the others a fifth is drawn for the test. Each
model is tuned by 5-fold cross-validation on the training part, with the same number of random trials; the best is
fitted anew on all of it in five runs that differ by the seed of the model. The table shows mean and deviation on the
test part: accuracy, or the area under the ROC curve where fewer than a fifth are positive (Bank, Purchase).

Data lies in AHOP_DATA_DIR or --data-dir, as docs/data.md says. Every trial and run is kept as soon as it is done, in
benchmarks/results/tabular.csv: the same command goes on where it was stopped. --quick is a small trial on a set that
ships with scikit-learn, and writes nowhere unless --output says so.
"""

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.metrics import accuracy_score, roc_auc_score
from sklearn.model_selection import StratifiedKFold, cross_val_score

from benchmarks.harness.command import explain_missing_data
from benchmarks.harness.rows import RESULTS, Rows
from benchmarks.paper.tabular.data import SETS, Split, files_of, load
from benchmarks.paper.tabular.models import MODELS, Context, Parameters, available
from benchmarks.paper.tabular.report import best_trial, report

SPLIT_SEED = 0
KINDS = ("trial", "run")


class Job(NamedTuple):
    """A trial (``chosen`` is what it tries) or a run (``chosen`` is the best of all trials)."""

    set: str
    rows: int | None
    model: str
    kind: str
    number: int
    chosen: Parameters
    folder: Path
    device: str

    @property
    def key(self) -> dict[str, str]:
        """What tells the rows of this job from others."""
        rows = "all rows" if self.rows is None else f"{self.rows} rows"
        return {"set": self.set, "settings": rows, "model": self.model, "kind": self.kind, "number": str(self.number)}


@lru_cache(maxsize=1)
def split_of(name: str, folder: Path, rows: int | None) -> Split:
    """The set of the jobs at hand, read once by each process."""
    return load(name, folder, SPLIT_SEED, rows)


def measure(job: Job) -> dict[str, float]:
    """Cross-validate a trial, or fit and test a run."""
    start = time.process_time()
    split = split_of(job.set, job.folder, job.rows)
    seed = job.number if job.kind == "run" else SPLIT_SEED
    model = MODELS[job.model].build(job.chosen, Context(seed, job.device, split.categories))
    if job.kind == "trial":
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


def missing_jobs(rows: Rows, options: argparse.Namespace, name: str, kind: str) -> Iterator[Job]:
    """Trials, or runs of models whose trials are complete, that are not among the rows."""
    for model in options.models:
        here = (name, options.rows, model)
        where = (options.data_dir, options.device)
        quick = MODELS[model].quick if options.quick else {}
        trials = [Job(*here, "trial", t, {**MODELS[model].draw(t), **quick}, *where) for t in range(options.trials)]
        jobs = trials
        if kind == "run":
            best = best_trial(rows.rows, [trial.key for trial in trials])
            jobs = [] if best is None else [Job(*here, "run", run, best, *where) for run in range(options.runs)]
        yield from (job for job in jobs if not rows.holds(job.key))


def work(rows: Rows, options: argparse.Namespace) -> None:
    """Do what is missing, set by set, first the trials and then the runs, until the time is up."""
    deadline = time.monotonic() + 60 * options.minutes
    with explain_missing_data():
        for name in options.sets:
            if any(any(missing_jobs(rows, options, name, kind)) for kind in KINDS):
                files_of(name, options.data_dir)  # what is missing is said here, and not by another process
    # Processes are spawned: a forked one could not use a GPU, and would inherit the threads of this one's libraries.
    with ProcessPoolExecutor(options.processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for name in options.sets:
            for kind in KINDS:
                jobs = list(missing_jobs(rows, options, name, kind))
                futures = {pool.submit(measure, job): job for job in jobs}
                for done, future in enumerate(as_completed(futures), 1):
                    if future.cancelled():
                        continue
                    job, measured = futures[future], future.result()
                    rows.add({**job.key, "chosen": json.dumps(job.chosen)}, measured)
                    figures = ", ".join(f"{name} {value:.4f}" for name, value in measured.items())
                    print(f"{name}: {kind} {done}/{len(jobs)}, {job.model} {job.number}: {figures}", flush=True)
                    if time.monotonic() > deadline:
                        for other in futures:
                            other.cancel()
                if time.monotonic() > deadline:
                    print(f"stopped after {options.minutes:g} minutes: the same command goes on here")
                    return


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sets", nargs="+", choices=SETS, default=list(SETS), help="data sets (all five)")
    add("--models", nargs="+", choices=MODELS, default=None, help="models (all that are installed)")
    add("--trials", type=int, default=10, help="parameter settings tried for each model (10)")
    add("--runs", type=int, default=5, help="runs of the best setting (5)")
    add("--rows", type=int, default=None, help="learn from so many rows only (all)")
    add("--data-dir", type=Path, default=Path(os.environ.get("AHOP_DATA_DIR", "data")), help="(AHOP_DATA_DIR, or data)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of the memories (what there is)")
    add("--processes", type=int, default=1, help="jobs at a time, each on one core (1)")
    add("--minutes", type=float, default=float("inf"), help="begin no job after so many minutes")
    add("--output", type=Path, default=None, help="the rows (benchmarks/results/tabular.csv)")
    add("--report", action="store_true", help="only print the tables of what has been measured")
    add("--quick", action="store_true", help="a small trial without data files")
    options = parser.parse_args()
    missing = [name for name in MODELS if name not in available()]
    if missing:
        print(f"not installed, left out: {', '.join(missing)}")
    options.models = [name for name in options.models or MODELS if name in available()]
    if options.quick:
        options.sets, options.trials, options.runs = ["tumours"], 2, 2
    return options


def main() -> None:
    """Measure and report."""
    options = parse()
    with contextlib.ExitStack() as stack:
        if options.quick and options.output is None:
            options.output = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tabular.csv"
        rows = Rows(options.output or RESULTS / "tabular.csv")
        if not options.report:
            rows.about(options.device)
            work(rows, options)
        print(report(rows.rows))


if __name__ == "__main__":
    main()
