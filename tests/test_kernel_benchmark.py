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
    output = tmp_path / "kernels.csv"

    def main(*options: str) -> list[dict[str, str]]:
        fixed = ["--output", str(output), "--threads", str(torch.get_num_threads())]
        monkeypatch.setattr(sys, "argv", ["kernels", *fixed, *options])
        kernels.main()
        return read(output)

    return main


def test_only_replaces_the_rows_of_its_cases_in_place(tmp_path, run):
    rows = [{**row, "ours_ms": "7"} for row in run()]
    foreign = [{**row, "device": "another"} for row in rows]
    assert len(rows) == 2 * len(CASES)
    write(tmp_path / "kernels.csv", [*foreign, *rows])
    after = run("--only", "d 5")
    assert after[: len(foreign)] == foreign
    mine = after[len(foreign) :]
    assert [(row["case"], row["pass"]) for row in mine] == [(row["case"], row["pass"]) for row in rows]
    assert [row["ours_ms"] for row in mine] == ["7", "7", "1", "1", "7", "7"]


def test_a_complete_run_removes_rows_of_former_cases(tmp_path, run):
    rows = run()
    write(tmp_path / "kernels.csv", [*rows, {**rows[0], "case": "gone"}])
    assert [row["case"] for row in run()] == [row["case"] for row in rows]


def test_only_without_a_matching_case_is_refused(tmp_path, run, capsys):
    with pytest.raises(SystemExit):
        run("--only", "d 512")
    assert f"expected a part of one of these names: {CASES[0].name}; " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("--only", "d 5", "--sweep")
    assert "--sweep" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
