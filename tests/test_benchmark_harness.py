"""Shared code of the benchmarks: commands, stored rows, tables, plots and peak memory."""

import mmap
import runpy
import sys
import warnings
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import kernels_report
from benchmarks.harness import pages
from benchmarks.harness.memory import CLEAR, peak, reset_peak
from benchmarks.harness.report import PICTURES, bold_best, bold_best_in_columns, drawing, picture_for
from benchmarks.harness.rows import RESULTS, ResultTable, read, write

pytestmark = pytest.mark.slow

COMMANDS = ("kernels", "packed", "vit", "costs", "search", "projects", "robust", "harness.pages")
PAPER = ("paper.retrieval", "paper.mil", "paper.images", "paper.tabular")


@pytest.mark.parametrize("name", COMMANDS + PAPER)
def test_every_command_prints_its_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the module may be imported already
        with pytest.raises(SystemExit) as end:
            runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m benchmarks.{name} ")
    assert f"To run: python -m benchmarks.{name} " in text.replace("AHOP_DATA_DIR=DIR ", "")


def test_rows_are_replaced_by_the_named_columns(tmp_path):
    old = [{"a": "1", "b": "x"}, {"a": "2", "b": "y"}, {"a": "1", "b": "z"}]
    new = [{"a": 1, "b": "p"}, {"a": 1, "b": "q"}, {"a": 3, "b": "r"}]
    for columns, expected in (((), "pqr"), (("a",), "pqyr"), (("a", "b"), "xyzpqr")):
        results = ResultTable(tmp_path / f"{expected}.csv", "cpu")
        results.add(*old)
        results.replace(new, *columns)
        assert [row["b"] for row in results.rows] == list(expected)
        assert read(results.path) == results.rows


def test_rows_of_another_device_are_kept_and_do_not_count(tmp_path):
    foreign = {"a": "1", "device": "another"}
    write(tmp_path / "rows.csv", [foreign])
    results = ResultTable(tmp_path / "rows.csv", "cpu")
    assert not results.has({"a": 1})
    results.replace([{"a": 1}])
    assert results.has({"a": 1})
    assert not results.has({"a": 2})
    assert read(results.path)[0].items() >= foreign.items()
    assert results.own_rows == read(results.path)[1:]
    assert results.own_rows[0].items() >= results.origin.items()


def test_rows_may_have_different_columns_and_are_not_empty(tmp_path):
    results = ResultTable(tmp_path / "figures.csv", "cpu")
    results.add_figures({"model": "A"}, {"accuracy": 0.123456789, "seconds": 1200.0})
    figures = [(row["model"], row["measure"], row["value"]) for row in read(results.path)]
    assert figures == [("A", "accuracy", "0.123457"), ("A", "seconds", "1200")]
    with pytest.raises(ValueError, match=r"expected rows to write to .*rows\.csv, got none"):
        write(tmp_path / "rows.csv", [])
    write(tmp_path / "rows.csv", [{"a": "1"}, {"a": "2", "new": "3"}])
    assert read(tmp_path / "rows.csv") == [{"a": "1", "new": ""}, {"a": "2", "new": "3"}]


def test_stored_results_keep_their_format(tmp_path):
    for path in RESULTS.glob("*.csv"):
        write(tmp_path / path.name, read(path))
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_best_figures_are_bold():
    assert bold_best(["0.5 ± 0.1", "", "0.7", "0.70 ± 0.2"]) == ["0.5 ± 0.1", "", "**0.7**", "**0.70 ± 0.2**"]
    assert bold_best(["1,200", "900"], min) == ["1,200", "**900**"]
    assert bold_best(["", ""]) == ["", ""]
    body = bold_best_in_columns([["a", "1", "2"], ["b", "3", "4"]], {1: max, 2: min})
    assert body == [["a", "1", "**2**"], ["b", "**3**", "4"]]


def test_block_footprints_are_compared_with_full_ones_of_the_same_size(monkeypatch):
    times = {"8 x 9, d 64": (6.0, 9.0), "8 x 9, d 64, n 8": (1.5, 3.0), "8 x 9, d 32, n 4": (0.5, None)}
    rows = [
        {"case": case, "pass": label, "ours_ms": str(value), "device": "A", "torch": "2", "commit": "c", "date": "d"}
        for case, pair in times.items()
        for label, value in zip(kernels_report.PASSES, pair, strict=True)
        if value is not None
    ]
    lines = kernels_report.of_blocks(rows).splitlines()[2:]
    assert lines == ["| 8 x 9, d 64 | 8 | 19 | 1.5 | 3 | 4 | 3 |", "| 8 x 9, d 32 | 4 | 5 | 0.5 |  |  |  |"]
    others = [{**row, "device": "B"} for row in rows if "n" not in row["case"]]
    monkeypatch.setattr(pages, "read", lambda path: [*rows, *others])
    assert pages.block_rows() == rows
    monkeypatch.setattr(pages, "read", lambda path: others)
    assert pages.TABLES["blocks"]() == "Not measured yet. To measure it: `python -m benchmarks.kernels`."


def test_lines_of_a_plot_differ_in_color_marker_and_dashes(tmp_path):
    with drawing(tmp_path / "drawn.svg", (2, 2)) as figure:
        lines = figure.subplots().plot([0, 1], [[0] * 8, [1] * 8])
    assert len({line.get_color() for line in lines}) == len({line.get_marker() for line in lines}) == 8
    assert all(a._unscaled_dash_pattern != b._unscaled_dash_pattern for a, b in pairwise(lines))


def test_only_results_of_the_project_are_drawn_in_the_documentation(tmp_path):
    assert picture_for(RESULTS / "mil.csv", "mil") == PICTURES / "mil.svg"
    assert picture_for(RESULTS / "retrieval_quick.csv", "retrieval") == RESULTS / "retrieval_quick.png"
    assert picture_for(tmp_path / "mil.csv", "mil") == tmp_path / "mil.png"
    assert picture_for(Path("elsewhere.csv"), "mil") == Path("elsewhere.png")


@pytest.mark.skipif(not CLEAR.exists(), reason="peak memory is read from /proc")
def test_the_peak_counts_from_the_last_reset():
    before, size = reset_peak("cpu"), 50_000_000
    with mmap.mmap(-1, size) as held:  # released at once, unlike memory of an allocator
        for _ in range(50):
            held.write(bytes(size // 50))
    assert peak("cpu") - before > 0.9 * size
    assert reset_peak("cpu") - before < 0.9 * size
