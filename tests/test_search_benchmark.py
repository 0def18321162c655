"""The search benchmarks: data, damage, rivals, the adaptive memory, costs, and small runs that are resumed."""

import gzip
import struct
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

import benchmarks.search.__main__ as command
from benchmarks.harness.rows import read
from benchmarks.search import ar, data, measure, packaged, rivals
from benchmarks.search.data import Images, ReplacedPixels
from benchmarks.search_costs import main

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


def test_splits_and_queries_depend_on_the_seed_alone(images, monkeypatch):
    split = data.split_halves(images, 0)
    assert [part.labels.bincount().tolist() for part in split] == [[EACH // 2] * CLASSES] * 2
    assert torch.equal(torch.cat([part.rows for part in split]).unique(dim=0), images.rows.unique(dim=0))
    assert torch.equal(data.split_halves(images, 0).stored.rows, split.stored.rows)
    assert not torch.equal(data.split_halves(images, 1).stored.rows, split.stored.rows)
    for kind in data.LEVELS:
        first, same, other = (data.queries(split, kind, 0.5, seed) for seed in (3, 3, 4))
        assert torch.equal(first, same)
        assert not torch.equal(first, other)
    assert torch.equal(data.queries(split, "pixels", 0.0, 0), split.asked.rows)
    monkeypatch.setattr(data, "MAX_IMAGES", 20)  # a larger set is cut to a random subset
    assert sum(len(part.labels) for part in data.split_halves(images, 0)) == 20


def test_idx_files_are_read(tmp_path):
    name = next(iter(data.IDX))
    (tmp_path / data.IDX[name]).mkdir()
    pixels = np.arange(2 * 784, dtype=np.int64).astype(np.uint8)
    contents = (struct.pack(">4i", 2051, 2, 28, 28) + pixels.tobytes(), struct.pack(">2i", 2049, 2) + bytes([7, 9]))
    for file, content in zip(data.IDX_FILES, contents, strict=True):
        (tmp_path / data.IDX[name] / file).write_bytes(gzip.compress(content))
    assert data.available(tmp_path) == [name]
    images = data.load(name, tmp_path)
    assert (images.labels.tolist(), images.shape) == ([7, 9], (28, 28))
    assert torch.equal((images.rows.flatten() * 255).round().to(torch.uint8), torch.from_numpy(pixels))


@pytest.mark.parametrize("name", ["Euclid", "cosine", "L1", "trimmed L1", "trimmed L1 of contrasts"])
def test_nearest_neighbors_find_the_stored_image_and_trimming_ignores_damaged_pixels(name, images):
    answer = rivals.RIVALS[name](images, ReplacedPixels((0.0, 0.5)), 0)(images.rows)
    assert torch.equal(answer.label, images.labels)
    if name != "cosine":  # images of a class differ little but in brightness
        assert torch.equal(answer.index, torch.arange(len(images.labels)))
    query = ReplacedPixels(0.5)(images.rows, torch.Generator().manual_seed(1))
    index = rivals.RIVALS[name](images, ReplacedPixels(0.5), 0)(query).index
    accuracy = (index == torch.arange(len(query))).float().mean()
    low, high = {"trimmed L1": (1, 1), "Euclid": (0, 0.79)}.get(name, (0, 1))
    assert low <= accuracy <= high


def test_sparse_representation_meets_the_optimality_conditions():
    """Among independent images: the solver converges slowly if images are nearly multiples of each other."""
    stored = Images(torch.rand(12, SIDE * SIDE, dtype=torch.double), torch.arange(12) // 3, (SIDE, SIDE))
    method = rivals.SparseRepresentation(stored, penalty=1e-2, steps=3000)
    damaged = ReplacedPixels(0.2)(stored.rows[::5], torch.Generator().manual_seed(0))
    query = torch.nn.functional.normalize(damaged)
    x, e = method.solve(query)
    residual = query - x @ method.rows - e
    for value, gradient in ((x, residual @ method.rows.mT), (e, residual)):
        assert gradient.abs().max() < 1e-2 + 1e-5
        moved = value.abs() > 1e-4
        assert moved.any()
        torch.testing.assert_close(gradient[moved], 1e-2 * value[moved].sign(), atol=1e-5, rtol=0)
    answer = method(query)
    assert torch.equal(answer.label, stored.labels[::5])
    assert torch.equal(stored.labels[answer.index], answer.label)
    method.batch = 2
    assert torch.equal(method(query).label, answer.label)


METHODS = {
    **packaged.OWN,
    "network": partial(rivals.convolutional, steps=40, batch=32, width=8),
    "robust coding": rivals.robust,
    "robust coding, tuned": partial(rivals.robust_tuned, queries=16),
}


@pytest.mark.parametrize(("kind", "name"), [*product(["pixels"], packaged.OWN), *product(["occlusion"], METHODS)])
def test_the_class_of_a_damaged_image_is_found(kind, name, images):
    split = data.split_halves(images, 0)
    before = torch.get_rng_state()
    classify = METHODS[name](split.stored, data.damage(kind, (0.0, 0.6), split.stored), 0)
    query = data.queries(split, kind, 0.3, 0)
    answer = classify(query)
    assert torch.equal(torch.get_rng_state(), before)
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


def test_a_run_is_stored_reported_and_resumed(folder, tmp_path, monkeypatch, capsys):
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
    for name in ("Euclid", "trimmed L1", *packaged.OWN):
        monkeypatch.setitem(measure.METHODS, name, lambda *_: pytest.fail("a stored row was measured again"))
    command.main(few)
    assert read(output) == rows


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak of resident memory from Linux")
def test_searches_are_timed_and_reported(tmp_path, capsys):
    output = tmp_path / "costs.csv"
    sizes = ["--sizes", "300,600", "--queries", "1,3", "--repeats", "1", "--dim", "8", "--output", str(output)]
    main(sizes)
    rows, shown = read(output), capsys.readouterr().out
    assert len(rows) == 4
    assert all(float(row["seconds"]) > 0 for row in rows)
    assert "| 600 | 3 | " in shown
    assert "Extrapolated to 1,000,000,000 patterns" in shown
    main(sizes)  # replaces rows
    assert len(read(output)) == len(rows)
