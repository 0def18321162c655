"""The search benchmarks: rivals and the adaptive memory, and small runs of faces, AR and costs."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import benchmarks.search.__main__ as command
from benchmarks import search_costs, search_recall
from benchmarks.harness.rows import read
from benchmarks.search import ar, data, measure, packaged, rivals
from benchmarks.search.data import Images

pytestmark = pytest.mark.slow

SIDE, CLASSES, EACH = 8, 4, 10


@pytest.fixture
def images():
    """Images of four classes: a random image of the class, with another brightness and a little noise each."""
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.rand(CLASSES, SIDE * SIDE, generator=generator)
    labels = torch.arange(CLASSES).repeat_interleave(EACH)
    gain = 0.6 + 0.4 * torch.rand(len(labels), 1, generator=generator)
    noise = 0.02 * torch.rand(len(labels), SIDE * SIDE, generator=generator)
    return Images(gain * prototypes[labels] + noise, labels, (SIDE, SIDE))


@pytest.fixture
def folder(tmp_path, images):
    """A data folder with the images as faces."""
    (tmp_path / "faces").mkdir()
    pixels = (images.rows * 200).to(torch.uint8).reshape(-1, SIDE, SIDE).numpy()
    np.savez(tmp_path / data.FACES, images=pixels, labels=images.labels.to(torch.uint8).numpy())
    return tmp_path


METHODS = {
    **packaged.OWN,
    "network": partial(rivals.convolutional, steps=40, batch=32, width=8),
    "robust coding": rivals.robust,
    "robust coding, tuned": partial(rivals.robust_tuned, queries=16),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_class_of_an_occluded_image_is_found(name, images):
    split = data.split_halves(images, 0)
    classify = METHODS[name](split.stored, data.damage("occlusion", (0.0, 0.6), split.stored), 0)
    answer = classify(data.queries(split, "occlusion", 0.3, 0))
    assert (answer.label == split.asked.labels).float().mean() > 0.8
    assert torch.equal(split.stored.labels[answer.index], answer.label)


def test_the_protocols_of_ar_store_and_ask_for_the_published_photos(monkeypatch, tmp_path, capsys):
    scipy = pytest.importorskip("scipy.io", reason="AR is a file of MATLAB")
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(ar, "PEOPLE", 4)
    faces = torch.rand(4, 1, 30, 42, generator=generator).expand(4, 26, 30, 42) * 250
    noise = 5 * torch.rand(faces.shape, generator=generator)
    file = tmp_path / "ar.mat"
    scipy.savemat(file, {"DATA": (faces + noise).to(torch.uint8).reshape(104, -1).T.numpy()})
    images = ar.load(file)
    assert images.rows.shape == (104, 1260)
    torch.testing.assert_close(images.rows[0].reshape(42, 30)[5, 7] * 255, (faces + noise)[0, 0, 7, 5].floor())
    asked = ar.select(images, (8, 21))
    assert asked.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert torch.equal(asked.rows[1], images.rows[20])
    rows = ar.measure(
        file, torch.device("cpu"), ar.ResultTable(tmp_path / "ar.csv", "cpu"), 1, ["L1", "fixed trimming"]
    )
    assert {float(row["accuracy"]) for row in rows} == {1.0}
    text = ar.accuracy_table(rows)
    assert "| RRC with L1, published | 0.990 | 0.933 | 0.893 | 0.763 |" in text
    assert "| fixed trimming | **1.000** |" in text
    assert "seed 0: fit" in capsys.readouterr().out


def test_a_run_is_stored_and_reported(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(measure.METHODS, packaged.OURS, packaged.untrained)  # without a fit, which takes seconds
    output = tmp_path / "rows.csv"
    given = ["--data-dir", str(folder), "--output", str(output), "--rivals", "Euclid", "trimmed L1"]
    few = ["--data", "faces", *given, "--device", "cpu", "--splits", "2", "--levels", "0.0", "0.3"]
    command.main(few)
    rows = read(output)
    assert len(rows) == 5 * 2 * 3  # methods, splits, two levels of pixels and one of occlusion
    assert all(0 <= float(row["accuracy"]) <= 1 for row in rows)
    assert "Accuracy on faces by the fraction of pixels replaced, 2 splits." in capsys.readouterr().out
    assert output.with_suffix(".png").exists()
    shown = measure.answers("faces", "pixels", 0.3, ["Euclid", packaged.OURS], folder, torch.device("cpu"), count=3)
    assert shown.split.asked.labels.tolist() == [0, 1, 3]
    assert shown.explained.shape == (3, SIDE, SIDE)
    assert command.report.draw_answers(shown, tmp_path / "answers.png").stat().st_size > 0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak of resident memory from Linux")
def test_searches_are_timed_and_reported(tmp_path, monkeypatch, capsys, small_fit):
    output = tmp_path / "costs.csv"
    monkeypatch.setattr(search_costs, "SHORTLIST", 200)
    sizes = ["--sizes", "150,600", "--queries", "1,3", "--repeats", "1", "--dim", "32", "--output", str(output)]
    search_costs.main(sizes)
    rows, shown = read(output), capsys.readouterr().out
    assert [row["search"] for row in rows] == 4 * ["exact"] + 2 * ["shortlist of 200"]
    assert all(float(row["seconds"]) > 0 for row in rows)
    exact, listed = (float(row["recall"]) for row in rows[-3::2])
    assert exact - 0.1 < listed <= exact + 0.02
    assert exact > 0.5
    assert "ms a query, 3 at once" in shown
    assert "| 600 | shortlist of 200 | " in shown


def test_recall_of_shortlists_is_measured_and_reported(tmp_path, monkeypatch, capsys, small_fit):
    pytest.importorskip("faiss", reason="a shortlist needs FAISS")
    monkeypatch.setattr(search_recall, "SHORTLISTS", (100,))
    output = tmp_path / "recall.csv"
    few = ["--sizes", "400", "--queries", "50", "--repeats", "1", "--dim", "16"]
    search_costs.main(["--recall", *few, "--output", str(output)])
    rows, shown = read(output), capsys.readouterr().out
    assert len(rows) == 5 * 4 + 4 * 3  # shares and methods: exact, shortlist, and FAISS
    recall = {tuple(row[name] for name in ("damage", "share", "method")): float(row["recall"]) for row in rows}
    assert recall["replaced", "0.3", "exact"] > 0.9
    assert recall["missing", "0.5", "exact"] > 0.9
    assert recall["replaced", "0.5", "FAISS, flat"] < recall["replaced", "0.5", "shortlist of 100"]
    assert "Recall among 400 patterns by the share of values replaced" in shown
