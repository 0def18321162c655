"""The benchmark of repair: it measures small sets with all rivals, continues, and shows a table."""

import pytest
import torch

from benchmarks import repair
from benchmarks.harness.rows import read

pytestmark = pytest.mark.slow


def tiny(name, folder, seed):
    """Images of 8 x 8 pixels of three classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(160) % 3
    rows = torch.rand(3, 64, generator=generator)[labels] + 0.05 * torch.rand(160, 64, generator=generator)
    return repair.Split(rows[:120], labels[:120], rows[120:], labels[120:])


def test_all_rivals_are_measured_once(monkeypatch, tmp_path, capsys, small_fit):
    monkeypatch.setattr(repair, "load", tiny)
    for name, value in {"WIDTH": 16, "CHECK": 4, "POOL": 2, "BATCH": 16}.items():
        monkeypatch.setattr(repair, name, value)
    output = tmp_path / "repair.csv"
    arguments = ["--kinds", "uniform", "missing", "--splits", "1", "--rivals", "1", "--steps", "24", "--as-rows"]
    for _ in range(2):
        repair.main([*arguments, "--output", str(output)])
    rows = read(output)
    assert len({tuple(row[key] for key in ("kind", "level", "measure")) for row in rows}) == len(rows)
    value = {(row["kind"], row["level"], row["measure"]): float(row["value"]) for row in rows}
    for name in ("frozen", "repaired", "known", "nearest", "median", *repair.NETWORKS):
        assert 0 <= value["uniform", "0.3", f"accuracy {name}"] <= 1
    assert value["missing", "0.3", "accuracy k-nearest"] > 0.9
    assert value["uniform", "0.3", "accuracy nearest"] > 0.9
    assert "| uniform | 0.3 |" in capsys.readouterr().out


def test_calibration_error_compares_probability_and_frequency():
    intact, right = torch.tensor([0.95, 0.95, 0.15, 0.15]), torch.tensor([True, True, True, False])
    assert repair.calibration_error(intact, right) == pytest.approx((2 * 0.05 + 2 * 0.35) / 4)
