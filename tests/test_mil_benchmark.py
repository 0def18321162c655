"""The bag benchmark: selection without test bags, a small run, the memory of a large bag."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import costs
from benchmarks.bags import DATA_SETS
from benchmarks.harness.rows import read
from benchmarks.paper.mil import __main__ as program
from benchmarks.paper.mil import measure as mil
from benchmarks.paper.mil import training as mil_training

KINDS = ("mask 0.5", "noise 2.0", "bias 0.5")

pytestmark = pytest.mark.slow


@pytest.fixture
def home(tmp_path):
    """A folder with a small Tiger: 48 bags with 6 features, one of them constant. Positive bags have an outlier."""
    generator = np.random.default_rng(0)
    sizes = generator.integers(2, 6, 48)
    labels = np.arange(48) % 2
    instances = generator.normal(size=(sizes.sum(), 6)).astype(np.float32)
    instances[(np.cumsum(sizes) - sizes)[labels == 1], 0] += 6
    instances[:, 5] = 7
    (tmp_path / "mil").mkdir()
    np.savez(tmp_path / "mil" / "tiger.npz", X=instances, bag_sizes=sizes.astype(np.int32), y=labels.astype(np.uint8))
    return tmp_path


@pytest.fixture
def one_setting(monkeypatch):
    """Reduces the search to one setting, three variants and two networks."""
    setting = mil_training.Setting(clip=4.0, lr=1e-2, dropout=0.0, epochs=4, batch=8)
    for module in (mil, mil_training):
        monkeypatch.setattr(module, "settings", lambda data: [setting])
        monkeypatch.setattr(module, "VARIANTS", {name: mil_training.VARIANTS[name] for name in KINDS})
    monkeypatch.setattr(mil, "NETWORKS", 2)
    return setting


def test_selection_does_not_use_test_bags(home, one_setting):
    data, kept = DATA_SETS["tiger"](home), torch.arange(36)
    hidden = data._replace(
        read=lambda number: data.read(number) * (1 if number < 36 else torch.nan),
        labels=torch.where(torch.arange(48) < 36, data.labels, 1 - data.labels),
    )
    offered = [one_setting, mil_training.Setting(clip=4.0, lr=1e-5, dropout=0.0, epochs=4, batch=8)]
    choices = [mil_training.choose(each, kept, "dot", offered, seed=1) for each in (data, hidden)]
    assert choices[0] == choices[1]
    assert choices[0][0] == one_setting  # the other learning rate is too small
    assert 1 <= choices[0][1] <= 4


def test_a_small_run(home, tmp_path, one_setting):
    size = ["--data", "tiger", "--folds", "2", "--repeats", "1", "--processes", "1", "--parts", "damaged"]
    program.main(["run", "--data-dir", str(home), *size, "--output", str(tmp_path / "rows.csv")])
    rows = read(tmp_path / "rows.csv")
    assert {(row["pooling"], row["measure"]) for row in rows} == {*product(mil.POOLINGS, KINDS)}
    assert all(0 <= float(row["value"]) <= 1 for row in rows)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
@pytest.mark.full
def test_memory_of_a_large_bag():
    instances, features = 20_000, 128
    _, most = costs.in_own_process(costs.pooling_cost, instances, features, 8, 0, "cpu")
    assert most < 2e9 * (instances * features) / (100_000 * 512)  # 2 GB for the full size
