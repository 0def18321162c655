"""The bag benchmark: folds and selection without test bags, resumed runs, tables, memory."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from benchmarks import costs
from benchmarks.bags import DATA_SETS, auc
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


def test_folds_cover_all_bags_once_with_both_labels_and_auc_counts_ties_as_halves():
    labels = (torch.arange(40) % 4 == 0).float()
    folds = mil_training.folds(labels, 5, seed=3)
    assert sorted(torch.cat([inside for _, inside in folds]).tolist()) == list(range(40))
    for outside, inside in folds:
        assert not set(outside.tolist()) & set(inside.tolist())
        assert labels[inside].sum() == 2
    again, other = (mil_training.folds(labels, 5, seed)[0][1] for seed in (3, 4))
    assert torch.equal(folds[0][1], again)
    assert not torch.equal(folds[0][1], other)
    scores = torch.randint(8, (40,)).float()
    assert auc(labels, scores) == pytest.approx(roc_auc_score(labels, scores))


def test_published_folds_come_first(home):
    data = DATA_SETS["tiger"](home)
    published = torch.ones(1, 2, 48, dtype=torch.bool)
    published[0, 0, :24] = published[0, 1, 24:] = False
    data = data._replace(splits=published)
    kept, held = mil_training.outer_folds(data, 2, 0)[0]
    assert (kept.tolist(), held.tolist()) == (list(range(24, 48)), list(range(24)))
    for count, repeat in ((3, 0), (2, 1)):  # not published
        drawn, own = (
            each[0][1]
            for each in (mil_training.outer_folds(data, count, repeat), mil_training.folds(data.labels, count, repeat))
        )
        assert torch.equal(drawn, own)


def test_features_are_standardized_by_training_bags(home):
    data = DATA_SETS["tiger"](home)
    train = torch.arange(30)
    bags = mil_training.StandardizedBags(data, train, clip=4.0)
    known, _ = bags.packed(train)
    assert bags.features == 5  # without the constant one
    torch.testing.assert_close(known.std(0), torch.ones(5), atol=0.05, rtol=0)  # up to clipping
    changed = data._replace(read=lambda number: data.read(number) * (1 if number < 30 else 50))
    others = mil_training.StandardizedBags(changed, train, clip=4.0)
    assert torch.equal(others.packed(train)[0], known)
    assert others.packed(torch.arange(30, 48))[0].abs().max() == 4


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


@pytest.mark.parametrize("pooling", mil.POOLINGS)
def test_every_pooling_learns(home, one_setting, pooling):
    found = mil.measure(mil.OuterFold("nested", "tiger", pooling, repeat=0, fold=1, folds=3), home)
    assert set(found) == {"auc", "epochs", *KINDS}
    assert found["auc"] > 0.65  # with ten other seeds of the data at least 0.75
    assert found["noise 2.0"] < found["auc"]  # with ten other seeds by at least 0.12
    if pooling == "adaptive":
        damaged = mil.OuterFold("damaged", "tiger", pooling, 0, 1, 3)
        found = mil.measure(damaged, home)
        assert found == mil.measure(damaged, home) != mil.measure(damaged._replace(repeat=1), home)
        assert set(found) == set(KINDS)
        assert found["bias 0.5"] > found["noise 2.0"]  # a bias costs little: with ten other seeds by at least 0.12


def test_a_second_run_resumes(home, tmp_path, one_setting, capsys):
    rows = tmp_path / "rows.csv"
    size = ["--data", "tiger", "--parts", "damaged", "--folds", "2", "--repeats", "1", "--processes", "1"]
    command = ["run", "--data-dir", str(home), *size, "--output", str(rows)]
    program.main([*command, "--poolings", "dot", "--minutes", "0"])
    assert "stopped after 0 minutes" in capsys.readouterr().out
    assert not rows.exists()
    program.main([*command, "--poolings", "dot"])
    kept = read(rows)
    assert [row["measure"] for row in kept] == list(KINDS)
    assert {row["pooling"] for row in kept} == {"dot"}
    (home / "mil" / "tiger.npz").unlink()  # complete rows need no data
    mil.load.cache_clear()
    program.main([*command, "--poolings", "dot"])
    with pytest.raises(SystemExit, match=r"mil/tiger\.npz, got no such file[\s\S]*docs/data\.md"):
        program.main([*command, "--poolings", "uniform"])
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
@pytest.mark.full
def test_memory_of_a_large_bag():
    instances, features = 20_000, 128
    _, most = costs.in_own_process(costs.pooling_cost, instances, features, 8, 0, "cpu")
    assert most < 2e9 * (instances * features) / (100_000 * 512)  # 2 GB for the full size
