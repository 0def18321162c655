"""The benchmark of search runs on small sizes, and its report has the measured and the extrapolated figures."""

from pathlib import Path

import pytest

from benchmarks.harness.rows import read
from benchmarks.search_costs import extrapolation, main

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak of resident memory from Linux")
def test_all_parts_run_and_are_reported(tmp_path, capsys):
    output = tmp_path / "costs.csv"
    sizes = "--sizes 300,600 --queries 1,3 --repeats 1 --shortlist 50 --dim 8"
    recalls = "--recall-patterns 600 --recall-queries 40 --recall-shortlists 20,600 --recall-epochs 6"
    main([*f"{sizes} {recalls}".split(), "--output", str(output)])
    rows, shown = read(output), capsys.readouterr().out
    assert {row["part"] for row in rows} == {"exact", "shortlist", "recall"}
    assert sum(row["part"] == "exact" for row in rows) == 4
    assert all(float(row["seconds"]) > 0 for row in rows if row["part"] != "recall")
    recall = {(row["corruption"], row["shortlist"]): float(row["value"]) for row in rows if row["measure"] == "recall"}
    assert len(recall) == 6
    assert all(value == 1 if shortlist == "600" else 0 <= value <= 1 for (_, shortlist), value in recall.items())
    assert "| 600 | 3 | 50 |" in shown
    assert "Extrapolated to 1,000,000,000 patterns" in shown
    main([*sizes.split(), "--parts", "exact", "--output", str(output)])  # replaces rows
    assert len(read(output)) == len(rows)


def test_the_extrapolation_is_proportional_to_the_largest_measurement():
    base = {"part": "exact", "queries": "2", "dim": "64"}
    rows = [base | {"patterns": "1000", "seconds": "9"}, base | {"patterns": "20000000", "seconds": "0.03"}]
    assert extrapolation(rows).splitlines()[-1] == "| exact | 2 | 20,000,000 | 256 | 3 | 1.50 | 0.50 |"


def test_unknown_parts_are_refused(refused):
    assert "--parts must be out of exact, shortlist, recall, got all" in refused(main, "--parts", "all")
