"""The benchmark of repair: it measures small sets with all rivals, continues, and shows a table."""

import numpy as np
import pytest
import torch
from sklearn.impute import KNNImputer

from benchmarks import repair
from benchmarks.damages import Drifted, Wrong, sensor_faults
from benchmarks.harness.rows import read

pytestmark = pytest.mark.slow


def tiny(name, folder, seed, device):
    """Images of 8 x 8 pixels of three classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(160) % 3
    rows = torch.rand(3, 64, generator=generator)[labels] + 0.05 * torch.rand(160, 64, generator=generator)
    return repair.Split(rows[:120], labels[:120], rows[120:], labels[120:], rows.mean(0), rows.std(0))


def test_all_rivals_are_measured_once(monkeypatch, tmp_path, capsys, small_fit):
    monkeypatch.setattr(repair, "load", tiny)
    for name, value in {"WIDTH": 16, "CHECK": 4, "POOL": 2, "BATCH": 16, "LEVELS": {}, "OTHER_LEVELS": (0.3,)}.items():
        monkeypatch.setattr(repair, name, value)
    output = tmp_path / "repair.csv"
    arguments = ["--kinds", "uniform", "missing", "--splits", "1", "--rivals", "3", "--steps", "24"]
    for _ in range(2):
        repair.main([*arguments, "--output", str(output)])
    rows = read(output)
    assert len({tuple(row[key] for key in ("kind", "level", "measure")) for row in rows}) == len(rows)
    value = {(row["kind"], row["measure"]): float(row["value"]) for row in rows}
    for name in ("frozen", "repaired", "known", "nearest", "median", *repair.NETWORKS):
        assert 0 <= value["uniform", f"accuracy {name}"] <= 1
    for name in ("k-nearest", "iterative", "trees"):
        assert value["missing", f"accuracy {name}"] > 0.6
    assert value["uniform", "accuracy nearest"] > 0.9
    assert value["uniform", "changed"] > 0.9
    shown = capsys.readouterr().out
    assert "\ndigits, stored as rows\n\n| kind | level | frozen | repaired |" in shown
    assert "\n| missing | 0.3 |" in shown
    assert "smallest gain over the frozen network: " in shown


def test_the_mean_of_nearest_rows_is_what_scikit_learn_imputes():
    split = tiny("digits", None, 0, None)
    query = split.asked.masked_fill(torch.rand(split.asked.shape) < 0.5, torch.nan)
    stored, asked = ((each / split.scale).double().numpy() for each in (split.stored, query))
    expected = KNNImputer(weights="distance").fit(stored).transform(asked)
    np.testing.assert_allclose(repair.nearest_mean(split, query) / split.scale, expected, rtol=1e-4)


def test_faults_are_what_they_say():
    rows, origin = torch.randn(200, 8), torch.full((50, 8), 9.0)
    found = {kind: Wrong(0.5, values)(origin) for kind, values in sensor_faults(rows).items()}
    for kind, query in found.items():
        assert ((query != 9).sum(-1) == 4).all(), kind
    changed = origin != found["stuck"]
    assert all(len(found["stuck"][:, column][changed[:, column]].unique()) == 1 for column in range(8))
    assert set(found["saturated"].unique().tolist()) <= {9.0, *rows.amin(0).tolist(), *rows.amax(0).tolist()}
    size = ((found["spikes"] - 9) / rows.std(0)).abs()[found["spikes"] != 9]
    assert 3 <= size.min() < size.max() <= 10.01
    assert set(found["swapped"].unique().tolist()) <= {9.0, *rows.unique().tolist()}
    assert 0.05 < found["faults"].isnan().double().mean() < 0.2
    drifted = Drifted((0.0, 1.0), torch.zeros(8))(origin)
    assert all(len(row.unique()) <= 2 for row in drifted)


def test_calibration_error_compares_probability_and_frequency():
    intact, right = torch.tensor([0.95, 0.95, 0.15, 0.15]), torch.tensor([True, True, True, False])
    assert repair.calibration_error(intact, right) == pytest.approx((2 * 0.05 + 2 * 0.35) / 4)
