"""The benchmark of robust search: every table runs on a small task and shows its rows."""

import pytest
import torch

from benchmarks.harness.rows import read
from benchmarks.robust import __main__ as robust
from benchmarks.robust import measure, tasks

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


@pytest.mark.parametrize(("table", "data", "line"), [
    ("levels", "faces16", "Accuracy, 1 split. A fit over all levels takes "),
    ("missing", "digits", "The smallest lead of *fitted* is "),
    ("scale", "digits", "| fitted | 1000.0 |"),
    pytest.param("pairs", "faces16", "| none: the damage itself", marks=pytest.mark.full),
    pytest.param("ablation", "digits", "| L1 of a share of the ranks", marks=pytest.mark.full),
])  # fmt: skip
def test_every_table_is_measured_and_shown(table, data, line, monkeypatch, tmp_path, capsys, small_fit):
    monkeypatch.setattr(robust, "make_task", tiny)
    monkeypatch.setattr(measure, "PAIRS", (16,))
    output = tmp_path / f"{table}.csv"
    robust.main(["--table", table, "--data", data, "--splits", "1", "--output", str(output)])
    values = [float(row["value"]) for row in read(output)]
    assert line in capsys.readouterr().out
    assert max(values) > 0
    if table == "scale":
        assert max(values) - min(values) < 0.03  # one query of 40 is 0.025
