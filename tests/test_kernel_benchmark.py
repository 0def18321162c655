"""The kernel benchmark replaces the rows that it measures and keeps the others."""

import sys

import pytest
import torch

from benchmarks import kernels
from benchmarks.harness.rows import read, write

CASES = [kernels.Case(2, 3, 4), kernels.Case(2, 3, 5), kernels.Case(3, 3, 4)]

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command line on small cases and returns the stored rows."""
    monkeypatch.setattr(kernels, "CASES", {"cpu": CASES})
    monkeypatch.setattr(kernels, "milliseconds", lambda function, device: 1.0)
    monkeypatch.setattr(kernels, "extra_megabytes", lambda *case: 0.5)

    def main(*options: str) -> list[dict[str, str]]:
        fixed = ["--output", str(tmp_path / "kernels.csv"), "--threads", str(torch.get_num_threads())]
        monkeypatch.setattr(sys, "argv", ["kernels", *fixed, *options])
        kernels.main()
        return read(tmp_path / "kernels.csv")

    return main


def test_a_run_replaces_the_rows_of_its_cases_in_place(tmp_path, run):
    rows = [{**row, "ours_ms": "7"} for row in run()]
    foreign = [{**row, "device": "another"} for row in rows]
    assert len(rows) == 2 * len(CASES)
    write(tmp_path / "kernels.csv", [*foreign, *rows, {**rows[0], "case": "gone"}])
    after = run("--only", "d 5")
    assert after[: len(foreign)] == foreign
    assert [row["ours_ms"] for row in after[len(foreign) :]] == ["7", "7", "1", "1", "7", "7", "7"]
    complete = run()  # removes rows of former cases
    assert [(row["case"], row["pass"]) for row in complete] == [(row["case"], row["pass"]) for row in [*foreign, *rows]]


@pytest.mark.parametrize(
    ("options", "message"),
    [(["d 512"], f"expected a part of one of these names: {CASES[0].name}; "), (["d 5", "--sweep"], "--sweep")],
)
def test_only_without_a_matching_case_is_refused(options, message, tmp_path, run, capsys):
    with pytest.raises(SystemExit):
        run("--only", *options)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
