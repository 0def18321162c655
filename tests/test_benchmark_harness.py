"""Shared code of the benchmarks: commands and stored rows; the kernels' benchmark; Wi-Fi signals."""

import runpy
import sys
from unittest.mock import patch

import numpy as np
import pytest
import torch
from scipy.io import savemat

from benchmarks import hflayers, kernels, wifi
from benchmarks.harness.rows import RESULTS, ResultTable, read, write

pytestmark = pytest.mark.slow

COMMANDS = ("kernels", "packed", "vit", "costs", "search", "projects", "hflayers", "robust", "harness.pages")
PAPER = ("paper.retrieval", "paper.mil", "paper.images", "paper.tabular")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the module may be imported already
@pytest.mark.parametrize("name", COMMANDS + PAPER)
def test_every_command_prints_its_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
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


def test_stored_results_keep_their_format(tmp_path):
    for path in RESULTS.glob("*.csv"):
        write(tmp_path / path.name, read(path))
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_kernels_replaces_the_rows_of_its_cases_in_place(tmp_path, monkeypatch):
    cases = [kernels.Case(2, 3, 4), kernels.Case(2, 3, 5), kernels.Case(3, 3, 4)]
    monkeypatch.setattr(kernels, "CASES", {"cpu": cases})
    monkeypatch.setattr(kernels, "milliseconds", lambda function, device: 1.0)
    monkeypatch.setattr(kernels, "extra_megabytes", lambda *case: 0.5)
    output = tmp_path / "kernels.csv"

    def run(*options: str) -> list[dict[str, str]]:
        fixed = ["--output", str(output), "--threads", str(torch.get_num_threads())]
        monkeypatch.setattr(sys, "argv", ["kernels", *fixed, *options])
        kernels.main()
        return read(output)

    rows = [{**row, "ours_ms": "7"} for row in run()]
    foreign = [{**row, "device": "another"} for row in rows]
    assert len(rows) == 2 * len(cases)
    write(output, [*foreign, *rows])
    after = run("--only", "d 5")
    assert after[: len(foreign)] == foreign
    assert [row["ours_ms"] for row in after[len(foreign) :]] == ["7", "7", "1", "1", "7", "7"]


def test_hflayers_are_compared_in_turns_from_equal_weights(tmp_path, monkeypatch, capsys):
    (tmp_path / "hflayers.py").write_text("from ahop_layers.hopfield import *")  # in place of a checkout
    small = {name: layer._replace(batch=8, length=6) for name, layer in hflayers.LAYERS.items()}
    monkeypatch.setattr(hflayers, "LAYERS", small)
    monkeypatch.setattr(hflayers, "in_own_process", lambda *arguments: 1.5)  # megabytes
    output = tmp_path / "hflayers.csv"
    common = ["--original", str(tmp_path), "--output", str(output), "--turns", "1", "--seconds", "0"]
    with patch.dict("sys.modules"):
        for name in [name for name in sys.modules if name.partition(".")[0] == "hflayers"]:
            del sys.modules[name]
        hflayers.main([*common, "--layers", "static", "pooling"])
        hflayers.main([*common, "--layers", "pooling", "--precisions", "bfloat16", "--systems", "plain"])
        original, adaptive = (hflayers.build("stored", each, "cpu", tmp_path) for each in ("hflayers", "adaptive"))
        assert type(original).__name__ == "HopfieldLayer"
        assert torch.equal(original.lookup_weights, adaptive.lookup_weights)
        monkeypatch.setattr(hflayers, "reset_peak", lambda device: 1e6)
        monkeypatch.setattr(hflayers, "peak", lambda device: 4e6)
        assert hflayers.cpu_megabytes("pooling", "4 blocks", "float32", tmp_path) == 3
        del sys.modules["hflayers"]
        monkeypatch.setattr(sys, "path", [])
        with pytest.raises(SystemExit, match="expected a checkout of hopfield-layers, got nothing"):
            hflayers.import_original("nothing")
    rows = read(output)
    assert [row["system"] for row in rows] == [*hflayers.SYSTEMS, *hflayers.SYSTEMS, "plain"]
    assert all(float(row[name]) > 0 for row in rows for name in ("ms", "hflayers ms"))
    lines = hflayers.report([{**row, "ms": "3", "hflayers ms": "2", "MB": "1", "hflayers MB": "4"} for row in rows])
    half = "| 1 x 6 | bfloat16 | 2 | 1.50 |  |  |  | 4 | 0.25 |  |  |  |"
    assert lines.splitlines()[-1].endswith(half)


def test_wifi_signals_that_are_not_heard_are_unknown(tmp_path):
    parts = {f"{part}{name}": np.full((count, width), value) for part, count in (("training", 4), ("test", 3))
             for name, width, value in (("Macs", 7, -60.0), ("Labels", 5, 2.5))}  # fmt: skip
    parts["testMacs"][1, 2] = wifi.NOT_HEARD
    savemat(tmp_path / "DSI1.mat", {"database": parts})
    data = wifi.load(tmp_path, "DSI1")
    assert [each.shape for each in data] == [(4, 7), (4, 3), (3, 7), (3, 3)]
    assert np.argwhere(np.isnan(data.asked)).tolist() == [[1, 2]]
    assert np.nanmax(data.asked) == -60
