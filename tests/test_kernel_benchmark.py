"""The benchmark of the kernels keeps what it does not measure; what all benchmarks share: rows, pictures, memory."""

import mmap
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import kernels
from benchmarks.memory import CLEAR, peak, reset_peak
from benchmarks.report import PICTURES, picture_for
from benchmarks.rows import RESULTS, read, replaced, write

CASES = [kernels.Case(2, 3, 4), kernels.Case(2, 3, 5), kernels.Case(3, 3, 4)]

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the command line on small cases; the rows it leaves."""
    monkeypatch.setattr(kernels, "CASES", {"cpu": CASES})
    monkeypatch.setattr(kernels, "milliseconds", lambda function, device: 1.0)
    monkeypatch.setattr(kernels, "extra_megabytes", lambda *case: 0.5)
    output = tmp_path / "kernels.csv"

    def main(*options: str) -> list[dict[str, str]]:
        monkeypatch.setattr(
            sys, "argv", ["kernels", "--output", str(output), "--threads", str(torch.get_num_threads()), *options]
        )
        kernels.main()
        return read(output)

    return main


def test_a_part_replaces_its_own_rows_at_their_place(tmp_path, run):
    rows = [{**row, "ours_ms": "7"} for row in run()]
    foreign = [{**row, "device": "another"} for row in rows]
    assert len(rows) == 2 * len(CASES)
    write(tmp_path / "kernels.csv", [*foreign, *rows])
    after = run("--only", "d 5")
    assert after[: len(foreign)] == foreign
    mine = after[len(foreign) :]
    assert [(row["case"], row["pass"]) for row in mine] == [(row["case"], row["pass"]) for row in rows]
    assert [row["ours_ms"] for row in mine] == ["7", "7", "1", "1", "7", "7"]


def test_all_cases_leave_no_row_of_a_case_that_is_gone(tmp_path, run):
    rows = run()
    write(tmp_path / "kernels.csv", [*rows, {**rows[0], "case": "gone"}])
    assert [row["case"] for row in run()] == [row["case"] for row in rows]


def test_a_part_that_is_none_is_refused(tmp_path, run, capsys):
    with pytest.raises(SystemExit):
        run("--only", "d 512")
    assert f"expected a part of one of these names: {CASES[0].name}; " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("--only", "d 5", "--sweep")
    assert "--sweep" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_rows_are_replaced_by_the_named_columns():
    old = [{"a": "1", "b": "x"}, {"a": "2", "b": "y"}, {"a": "1", "b": "z"}]
    new = [{"a": 1, "b": "p"}, {"a": 1, "b": "q"}, {"a": 3, "b": "r"}]
    assert [row["b"] for row in replaced(old, new, "a")] == ["p", "q", "y", "r"]
    assert [row["b"] for row in replaced(old, new, "a", "b")] == ["x", "y", "z", "p", "q", "r"]


def test_a_file_without_rows_is_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"expected rows to write to .*rows\.csv, got none"):
        write(tmp_path / "rows.csv", [])
    write(tmp_path / "rows.csv", [{"a": "1"}, {"a": "2", "new": "3"}])
    assert read(tmp_path / "rows.csv") == [{"a": "1", "new": ""}, {"a": "2", "new": "3"}]


def test_only_the_rows_of_the_project_are_drawn_in_the_documentation(tmp_path):
    assert picture_for(RESULTS / "mil.csv", "mil") == PICTURES / "mil.svg"
    assert picture_for(RESULTS / "retrieval_quick.csv", "retrieval") == RESULTS / "retrieval_quick.png"
    assert picture_for(tmp_path / "mil.csv", "mil") == tmp_path / "mil.png"
    assert picture_for(Path("elsewhere.csv"), "mil") == Path("elsewhere.png")


@pytest.mark.skipif(not CLEAR.exists(), reason="peak memory is read from /proc")
def test_the_peak_is_what_was_held_since_the_reset():
    before, size = reset_peak("cpu"), 50_000_000
    with mmap.mmap(-1, size) as held:  # given back at once, which an allocator need not do
        for _ in range(50):
            held.write(bytes(size // 50))
    assert peak("cpu") - before > 0.9 * size
    assert reset_peak("cpu") - before < 0.9 * size
