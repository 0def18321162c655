"""The positioning benchmark: data, rivals, and a small run that is resumed."""

import numpy as np
import pytest
from scipy.io import savemat

from benchmarks import positioning
from benchmarks.harness.rows import read

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path):
    """A data folder with a hall of 20 x 20 m and 25 access points, of which many are not heard."""
    random = np.random.default_rng(0)
    stations, places = random.uniform(0, 20, (25, 2)), random.uniform(0, 20, (150, 2))
    signal = -30 - 4 * np.linalg.norm(places[:, None] - stations, axis=-1) + random.normal(0, 3, (150, 25))
    signal[signal < -75] = positioning.NOT_HEARD
    labels = np.concatenate([places, np.zeros((150, 3))], axis=1)
    data = {"trainingMacs": signal[:100], "testMacs": signal[100:]}
    data |= {"trainingLabels": labels[:100], "testLabels": labels[100:]}
    savemat(tmp_path / "DSI1.mat", {"database": data})
    return tmp_path


def test_signals_that_are_not_heard_are_unknown(folder):
    places = positioning.load(folder, "DSI1")
    assert places.stored.shape == (100, 25)
    assert places.target.shape == (50, 3)
    assert -76 < np.nanmin(places.stored) < np.nanmax(places.stored) < 0
    assert 0.05 < np.isnan(places.stored).mean() < 0.95


def test_neighbors_of_rivals_are_those_of_powed_signals(folder):
    places = positioning.load(folder, "DSI1")
    low = np.nanmin(places.stored) - 1
    stored, asked = (
        (np.nan_to_num(each - low, nan=0.0).clip(0) / -low) ** np.e for each in (places.stored, places.asked)
    )
    difference = np.abs(asked[:, None] - stored).sum(-1)
    found = positioning.rival_neighbors(places, *positioning.RIVALS["Sorensen, powed"])
    assert (found[:, 0] == (difference / (asked.sum(-1)[:, None] + stored.sum(-1))).argmin(1)).all()
    assert (positioning.rival_neighbors(places, *positioning.RIVALS["L1, powed"])[:, 0] == difference.argmin(1)).all()


def test_ranks_of_equal_errors_are_shared():
    found = {"a": {"x": 1.0, "y": 2.0}, "b": {"x": 1.0, "y": 1.0}, "c": {"x": 3.0, "y": 3.0}}
    assert positioning.ranks(found, "abc", "xy") == {"a": 1.75, "b": 1.25, "c": 3.0}


def test_a_run_is_resumed_and_reported(folder, capsys, monkeypatch):
    output = folder / "rows.csv"
    arguments = ["--data", str(folder), "--sets", "DSI1", "--seeds", "1", "--output", str(output)]
    positioning.main(arguments)
    first = capsys.readouterr().out
    for title in ("with 1 neighbor,", "with 11 neighbors,", positioning.OURS):
        assert title in first
    rows = read(output)
    assert len(rows) == 2 * (len(positioning.RIVALS) + len(positioning.OWN))
    errors = {row["method"]: float(row["error_m"]) for row in rows if row["neighbors"] == "11"}
    assert errors[positioning.OURS] < 1.1 * min(errors.values())
    monkeypatch.setattr(positioning, "measure", None)  # nothing is measured again
    positioning.main(arguments)
    assert first.endswith(capsys.readouterr().out)
