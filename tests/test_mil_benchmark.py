"""The benchmark of bag poolings: folds and choices that do not see the test, rows that resume, tables, memory."""

import csv
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import mil, mil_memory, mil_report, mil_training
from benchmarks.rows import write

# isort: split
from examples.bags import data as mil_data

KINDS = ("mask 0.5", "noise 2.0", "bias 0.5")

pytestmark = pytest.mark.slow


@pytest.fixture
def home(tmp_path):
    """A small Tiger: 48 bags of 6 features, in half of which one instance is different. One feature is constant."""
    generator = np.random.default_rng(0)
    sizes = generator.integers(2, 6, 48)
    labels = np.arange(48) % 2
    instances = generator.normal(size=(sizes.sum(), 6)).astype(np.float32)
    instances[(np.cumsum(sizes) - sizes)[labels == 1], 0] += 3
    instances[:, 5] = 7
    (tmp_path / "mil").mkdir()
    np.savez(tmp_path / "mil" / "tiger.npz", X=instances, bag_sizes=sizes.astype(np.int32), y=labels.astype(np.uint8))
    return tmp_path


@pytest.fixture
def one_setting(monkeypatch):
    """A search that is over soon."""
    setting = mil_training.Setting(clip=4.0, lr=1e-2, dropout=0.0, epochs=4, batch=8)
    for module in (mil, mil_training):
        monkeypatch.setattr(module, "settings", lambda data: [setting])
        monkeypatch.setattr(module, "VARIANTS", {name: mil_training.VARIANTS[name] for name in KINDS})
    monkeypatch.setattr(mil, "NETWORKS", 2)
    return setting


def test_folds_cover_all_bags_once_with_both_labels():
    labels = (torch.arange(40) % 4 == 0).float()
    folds = mil_training.folds(labels, 5, seed=3)
    assert sorted(torch.cat([inside for _, inside in folds]).tolist()) == list(range(40))
    for outside, inside in folds:
        assert not set(outside.tolist()) & set(inside.tolist())
        assert labels[inside].sum() == 2
    again, other = (mil_training.folds(labels, 5, seed)[0][1] for seed in (3, 4))
    assert torch.equal(folds[0][1], again)
    assert not torch.equal(folds[0][1], other)


def test_published_folds_come_first(home):
    data = mil_data.DATA_SETS["tiger"](home)
    published = torch.ones(1, 2, 48, dtype=torch.bool)
    published[0, 0, :24] = published[0, 1, 24:] = False
    data = data._replace(splits=published)
    kept, held = mil_training.outer_folds(data, 2, 0)[0]
    assert (kept.tolist(), held.tolist()) == (list(range(24, 48)), list(range(24)))
    for count, repeat in ((3, 0), (2, 1)):  # of these none were published
        drawn, own = (
            each[0][1]
            for each in (mil_training.outer_folds(data, count, repeat), mil_training.folds(data.labels, count, repeat))
        )
        assert torch.equal(drawn, own)


def test_features_are_measured_by_training_bags(home):
    data = mil_data.DATA_SETS["tiger"](home)
    train = torch.arange(30)
    bags = mil_training.Bags(data, train, clip=4.0)
    known, _ = bags.packed(train)
    assert bags.features == 5  # the constant one is left out
    torch.testing.assert_close(known.std(0), torch.ones(5), atol=0.05, rtol=0)  # but for what is clipped
    changed = data._replace(read=lambda number: data.read(number) * (1 if number < 30 else 50))
    others = mil_training.Bags(changed, train, clip=4.0)
    assert torch.equal(others.packed(train)[0], known)
    assert others.packed(torch.arange(30, 48))[0].abs().max() == 4


def test_a_choice_does_not_see_the_bags_under_test(home, one_setting):
    data, kept = mil_data.DATA_SETS["tiger"](home), torch.arange(36)
    hidden = data._replace(
        read=lambda number: data.read(number) * (1 if number < 36 else torch.nan),
        labels=torch.where(torch.arange(48) < 36, data.labels, 1 - data.labels),
    )
    offered = [one_setting, mil_training.Setting(clip=4.0, lr=1e-5, dropout=0.0, epochs=4, batch=8)]
    choices = [mil_training.choose(each, kept, "dot", offered, seed=1) for each in (data, hidden)]
    assert choices[0] == choices[1]
    assert choices[0][0] == one_setting  # the other one hardly learns
    assert 1 <= choices[0][1] <= 4


@pytest.mark.parametrize("pooling", mil.POOLINGS)
def test_every_pooling_learns(home, one_setting, pooling):
    found = mil.measure(mil.Job("nested", "tiger", pooling, repeat=0, fold=1, folds=3), home)
    assert set(found) == {"auc", "epochs", *KINDS}
    assert found["auc"] > 0.75
    assert found["noise 2.0"] < found["auc"]


def test_all_bags_corrupted_and_the_seed_decides(home, one_setting):
    job = mil.Job("corrupted", "tiger", "adaptive", 0, 1, 3)
    found = mil.measure(job, home)
    assert found == mil.measure(job, home)
    assert found != mil.measure(job._replace(repeat=1), home)
    assert set(found) == set(KINDS)
    assert found["bias 0.5"] > found["noise 2.0"]  # a bias that is there in training, too, costs little


def test_rows_are_kept_once_and_a_second_run_goes_on(home, tmp_path, one_setting, capsys):
    rows = tmp_path / "rows.csv"
    size = ["--data", "tiger", "--parts", "corrupted", "--folds", "2", "--repeats", "1", "--processes", "1"]
    command = ["run", "--data-dir", str(home), *size, "--output", str(rows)]
    mil.main([*command, "--poolings", "dot", "--minutes", "0"])
    assert "stopped after 0 minutes" in capsys.readouterr().out
    assert not rows.exists()
    mil.main([*command, "--poolings", "dot"])
    with rows.open(newline="") as file:
        kept = list(csv.DictReader(file))
    assert [row["measure"] for row in kept] == list(KINDS)
    assert {row["pooling"] for row in kept} == {"dot"}
    (home / "mil" / "tiger.npz").unlink()  # what has its rows is not measured again, so the data are not missed
    mil.load.cache_clear()
    mil.main([*command, "--poolings", "dot"])
    with pytest.raises(SystemExit, match=r"mil/tiger\.npz, got no such file[\s\S]*docs/data\.md"):
        mil.main([*command, "--poolings", "uniform"])
    assert not list(tmp_path.glob("*.part"))


def test_tables_have_paired_differences_and_the_paper(tmp_path):
    measured = {"dot": (0.90, 0.92, 0.91), "adaptive": (0.91, 0.92, 0.93)}
    rows = mil.Rows(tmp_path / "none.csv")
    for pooling, values in measured.items():
        for repeat, value in enumerate(values):
            common = {"data": "tiger", "pooling": pooling, "repeat": str(repeat), "device": "test"}
            for part, measure in (("nested", "auc"), ("nested", "mask 0.5"), ("corrupted", "mask 0.5")):
                rows.rows.append({"part": part, "measure": measure, "value": str(value), **common})
    shown = mil_report.report(rows.rows)
    pairs = [a - d for a, d in zip(measured["adaptive"], measured["dot"], strict=True)]
    error = statistics.stdev(pairs) / 3**0.5
    assert f"| tiger | A-Hop | 3 | 0.9200 | 0.0100 | 0.9030 | +0.0100 | {error:.4f} |" in shown
    assert f"| mask, all bags | 0.5 | 0.9100 | 0.9200 | +0.0100 ± {error:.4f} |" in shown
    short = mil_report.short_table(mil_report.arrange(rows.rows), ["tiger"])
    assert "| A-Hop | 0.920 (0.903) |" in short
    assert f"| A-Hop above M-Hop | +0.0100 ± {error:.4f} |" in short
    assert mil_report.draw(rows.rows, tmp_path / "docs" / "mil.svg")
    drawn = (tmp_path / "docs" / "mil.svg").read_text()
    assert all(text in drawn for text in ("masked features (share)", "corrupted: all bags", "A-Hop"))
    assert not mil_report.draw([], tmp_path / "none.svg")
    write(tmp_path / "rows.csv", rows.rows)
    mil.main(["report", "--output", str(tmp_path / "rows.csv")])
    assert (tmp_path / "rows.png").exists()  # beside the rows, since these are not the project's


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
def test_memory_of_a_large_bag():
    instances, features = 20_000, 128
    _, most = mil_memory.in_own_process(mil_memory.measure, instances, features, 8, 0, "cpu")
    assert most < 2e9 * (instances * features) / (100_000 * 512)  # the share of 2 GB that its size allows
