"""Which models of other libraries ``adapt_`` reaches: each is adapted, run and checked against the plain model.

To run: python -m tests.models [--libraries timm transformers …] [--parts count run]

``count`` finds the attention modules of all models of timm on the meta device. ``run`` takes small models with random
weights: the smallest of each family of timm, small configurations of transformers, torchvision, diffusers,
segment-anything and open_clip. It checks that outputs are kept at initialization, that changed weights change them,
that every similarity gets a gradient, copies, pickles, state dicts and revert_, and that an adapted model compiles into
one graph if the plain one does. Rows replace those of the same model. The command ends with an error if a check fails,
or if fewer models are adapted than :data:`LEAST` says.
"""

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.harness.rows import RESULTS, ResultTable
from tests.frameworks import make_torchvision_importable
from tests.models import huggingface, image_models, others
from tests.models.check import Case, check

LIBRARIES = ("timm", "transformers", "torchvision", "diffusers", "segment-anything", "open_clip")
PACKAGES = {"segment-anything": "segment_anything", "open_clip": "open_clip_torch"}
"""Names on PyPI, where they differ from those of the libraries."""


LEAST = {"timm": (500, 600), "transformers": (60, 60)}
"""Least number of models that are adapted fully, and at least partly."""


def too_few(library: str, coverages: Sequence[object]) -> list[str]:
    """Returns a failure if too few models of a library are adapted."""
    fully, partly = LEAST.get(library, (0, 0))
    some = sum(coverage in ("fully", "partly") for coverage in coverages)
    if coverages.count("fully") >= fully and some >= partly:
        return []
    least = f"{fully} models fully and {partly} at least partly"
    return [f"{library}: expected {least}, got {coverages.count('fully')} and {some} of {len(coverages)}"]


def count(table: ResultTable, only: Sequence[str]) -> None:
    """Counts all models of timm, or those of some families."""
    for family, names in image_models.families().items():
        if only and family not in only:
            continue
        rows = [{"family": family, **image_models.count(name)} for name in names]
        found = [{"version": version("timm"), **row} for row in rows if row["coverage"] != "none"]
        if found:
            table.replace(found, "family", "name")
            print(family, dict(Counter(str(row["coverage"]) for row in found)), flush=True)


def run(table: ResultTable, cases: Iterable[Case], compile: bool) -> list[str]:
    """Checks models and stores their rows; returns the failures."""
    failures = []
    for case in cases:
        start, name = time.perf_counter(), f"{case.library} {case.family}"
        try:
            result = check(case, compile)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
            print(f"FAILED {failures[-1]}", flush=True)
            continue
        key = {"library": case.library, "version": version(PACKAGES.get(case.library, case.library))}
        table.replace([{**key, "family": case.family, "model": case.model, **result}], "library", "family")
        shown = f"{result['coverage']} {result['adapted']}/{result['of']} {result['change']} {result['one_graph']}"
        print(f"{name}: {shown} ({time.perf_counter() - start:.0f} s)", flush=True)
    return failures


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.models", description=__doc__, formatter_class=raw)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES, help="libraries to run")
    parser.add_argument("--parts", nargs="+", choices=("count", "run"), default=("count", "run"), help="what to do")
    parser.add_argument("--families", nargs="+", default=(), help="only these families")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="also compile models")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--path", nargs="*", default=(), help="folders to import libraries from")
    options = parser.parse_args(arguments)
    sys.path.extend(options.path)
    make_torchvision_importable()
    warnings.simplefilter("ignore")
    counted = ResultTable(options.results / "models_timm.csv", "cpu")
    failures = []
    if "count" in options.parts and "timm" in options.libraries:
        count(counted, options.families)
        if not options.families:
            failures += too_few("timm", [row["coverage"] for row in counted.own_rows])
    if "run" in options.parts:
        cases = [*image_models.cases(counted.own_rows), *huggingface.CASES, *others.CASES]
        wanted = [case for case in cases if case.library in options.libraries]
        wanted = [case for case in wanted if not options.families or case.family in options.families]
        table = ResultTable(options.results / "models.csv", "cpu")
        failures += run(table, wanted, options.compile)
        if "transformers" in options.libraries and not options.families:
            rows = [row for row in table.own_rows if row["library"] == "transformers"]
            failures += too_few("transformers", [row["coverage"] for row in rows])
    if failures:
        sys.exit("\n".join(failures))
    print("all models passed")


if __name__ == "__main__":
    main()
