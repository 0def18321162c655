"""The benchmark of robust search: every table runs on a small task, resumes, and shows its rows."""

import pytest
import torch
from sklearn.metrics import pairwise

from benchmarks.harness.report import group
from benchmarks.harness.rows import read
from benchmarks.robust import __main__ as robust
from benchmarks.robust import measure, report, tasks

pytestmark = pytest.mark.slow


def tiny(name, folder, generator):
    """A task of 40 patterns with 12 dimensions, with classes if it is that of faces."""
    rows = torch.rand(120, 12, generator=generator)
    labels = torch.arange(120) % 10
    damage = tasks.replace(torch.zeros(()), torch.ones(()))
    if name != "faces16":
        return tasks.Task(rows[:40], None, rows[:40], torch.arange(40), damage, (0.0, 0.5), 0.5)
    rows = rows[labels] + 0.05 * rows
    return tasks.Task(rows[:40], labels[:40], rows[40:80], labels[40:80], damage, (0.0, 0.5), 0.5)._replace(
        spare=rows[80:], spare_labels=labels[80:]
    )


@pytest.fixture
def run(monkeypatch, tmp_path, capsys, small_fit):
    """Measures a table of small tasks; returns its rows and what it printed."""

    def run(table, *data):
        monkeypatch.setattr(robust, "make_task", tiny)
        monkeypatch.setattr(measure, "PAIRS", (16,))
        output = tmp_path / f"{table}.csv"
        robust.main(["--table", table, "--data", *data, "--splits", "1", "--output", str(output)])
        return read(output), capsys.readouterr().out

    return run


def values(rows):
    return {(row["data"], row["method"], row["level"]): float(row["value"]) for row in rows}


def test_levels(run):
    rows, shown = run("levels", "faces16")
    assert {row["method"] for row in rows} == {*report.METHODS}
    assert values(rows)["faces16", "fitted", "-1.0"] > 0
    assert "person: accuracy by the level of damage, 1 split; fitted in " in shown
    again, shown = run("levels", "faces16")
    assert again == rows
    assert "split 1 of 1: " not in shown  # nothing was missing


def test_missing_and_scale(run):
    rows, shown = run("missing", "digits")
    found = values(rows)
    assert len(found) == 8
    assert found["digits", "fitted", "0.3"] == found["digits", "L1", "0.3"] == 1.0
    assert "The smallest lead of *fitted* is " in shown
    rows, shown = run("scale", "digits")
    assert [row["level"] for row in rows] == ["0.001", "1.0", "1000.0"]
    assert max(values(rows).values()) - min(values(rows).values()) < 0.03  # one query of 40 is 0.025


@pytest.mark.full
def test_pairs_and_ablation(run, tmp_path):
    rows, shown = run("pairs", "faces16")
    assert [(row["method"], row["level"]) for row in rows] == [("not fitted", "0"), ("damage", "0"), ("pairs", "16")]
    assert "| none: the damage itself" in shown
    assert (tmp_path / "pairs.png").exists()
    rows, shown = run("ablation", "digits")
    assert [method for (method,) in group(rows, "method")] == [*report.ABLATION]
    assert all(f"| {name} | " in shown for name in report.ABLATION.values())


def test_euclid_orders_patterns_as_scikit_learn_does():
    query, stored = torch.rand(2, 30, 8, generator=torch.Generator().manual_seed(0))
    query[torch.rand(30, 8, generator=torch.Generator().manual_seed(1)) < 0.5] = torch.nan
    query[:, 0] = 0.5
    score = measure.distances(query, stored, torch.ones(1), ("Euclid",))["Euclid"][0]
    expected = pairwise.nan_euclidean_distances(query.double().numpy(), stored.double().numpy())
    torch.testing.assert_close(-score, torch.from_numpy(expected).square().float(), rtol=1e-5, atol=1e-6)
