"""The search benchmark: data, corruptions, rivals, the adaptive memory, and a small run that is resumed."""

import gzip
import struct

import numpy as np
import pytest
import torch

import benchmarks.search.__main__ as command
from benchmarks.harness.rows import read
from benchmarks.search import data, measure, ours, rivals, tune
from benchmarks.search.data import ForeignBlock, Images, ReplacedPixels, Split

SIDE, CLASSES, EACH = 8, 4, 10


@pytest.fixture
def images():
    """Images of four classes: a random image of the class, with another brightness and a little noise each."""
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.rand(CLASSES, SIDE * SIDE, generator=generator)
    labels = torch.arange(CLASSES).repeat_interleave(EACH)
    gain = 0.6 + 0.4 * torch.rand(len(labels), 1, generator=generator)
    noise = 0.02 * torch.rand(len(labels), SIDE * SIDE, generator=generator)
    return Images(gain * prototypes[labels] + noise, labels, SIDE)


@pytest.fixture
def folder(tmp_path, images):
    """A data folder with the images as faces."""
    (tmp_path / "faces").mkdir()
    pixels = (images.rows * 200).to(torch.uint8).reshape(-1, SIDE, SIDE).numpy()
    np.savez(tmp_path / data.FACES, images=pixels, labels=images.labels.to(torch.uint8).numpy())
    return tmp_path


def test_a_split_halves_every_class_and_depends_on_the_seed(images):
    split = data.split_halves(images, 0)
    for part in split:
        assert part.labels.bincount().tolist() == [EACH // 2] * CLASSES
    together = torch.cat([part.rows for part in split])
    assert torch.equal(together.unique(dim=0), images.rows.unique(dim=0))
    assert torch.equal(data.split_halves(images, 0).stored.rows, split.stored.rows)
    assert not torch.equal(data.split_halves(images, 1).stored.rows, split.stored.rows)


def test_large_sets_are_cut_to_a_random_subset(images, monkeypatch):
    monkeypatch.setattr(data, "MAX_IMAGES", 20)
    assert sum(len(part.labels) for part in data.split_halves(images, 0)) == 20


def test_replaced_pixels_stay_below_the_largest_value_of_their_image():
    origin = torch.tensor([[0.25], [1.0]]).repeat(1, 1000)
    query = ReplacedPixels(0.4).corrupt(origin, torch.Generator().manual_seed(0))
    assert (query != origin).sum(-1).tolist() == [400, 400]
    assert (query.amax(-1) <= origin.amax(-1)).all()
    assert 0.2 < query[1][query[1] != 1].mean() < 0.8


def test_a_foreign_block_is_a_square_of_another_image_turned_upside_down():
    other = torch.arange(1.0, 65.0)[None]
    query = ForeignBlock(0.25, other, 8).corrupt(torch.zeros(5, 64), torch.Generator().manual_seed(0)).reshape(5, 8, 8)
    turned = other.reshape(8, 8).flip(0)
    for each in query:
        rows, columns = (each != 0).any(1), (each != 0).any(0)
        assert rows.sum() == columns.sum() == 4
        assert torch.equal(each, turned * (rows[:, None] & columns))


def test_queries_depend_on_level_and_seed_alone(images):
    split = data.split_halves(images, 0)
    for kind in data.LEVELS:
        first = data.queries(split, kind, 0.5, 3)
        assert torch.equal(first, data.queries(split, kind, 0.5, 3))
        assert not torch.equal(first, data.queries(split, kind, 0.5, 4))
    assert torch.equal(data.queries(split, "pixels", 0.0, 0), split.asked.rows)


@pytest.mark.parametrize("name", data.IDX)
def test_idx_files_are_read(name, tmp_path):
    (tmp_path / data.IDX[name]).mkdir()
    pixels = np.arange(2 * 784, dtype=np.int64).astype(np.uint8)
    for file, header, content in zip(
        data.IDX_FILES,
        (struct.pack(">4i", 2051, 2, 28, 28), struct.pack(">2i", 2049, 2)),
        (pixels.tobytes(), bytes([7, 9])),
        strict=True,
    ):
        (tmp_path / data.IDX[name] / file).write_bytes(gzip.compress(header + content))
    assert data.available(tmp_path) == [name]
    images = data.load(name, tmp_path)
    assert images.labels.tolist() == [7, 9]
    assert images.side == 28
    assert torch.equal((images.rows.flatten() * 255).round().to(torch.uint8), torch.from_numpy(pixels))
    with pytest.raises(FileNotFoundError, match=r"expected the data set faces in .*yale_b\.npz"):
        data.load("faces", tmp_path)


@pytest.mark.parametrize("name", ["Euclid", "cosine", "L1", "trimmed L1", "trimmed L1 of contrasts"])
def test_nearest_neighbors_find_the_stored_image_itself(name, images):
    answer = rivals.RIVALS[name](images, ReplacedPixels((0.0, 0.5)), 0)(images.rows)
    assert torch.equal(answer.label, images.labels)
    if name != "cosine":  # images of a class differ little but in brightness
        assert torch.equal(answer.index, torch.arange(len(images.labels)))


def test_trimming_ignores_the_corrupted_pixels(images):
    generator = torch.Generator().manual_seed(1)
    query = ReplacedPixels(0.5).corrupt(images.rows, generator)
    accuracy = {}
    for name in ("Euclid", "trimmed L1"):
        answer = rivals.RIVALS[name](images, ReplacedPixels(0.5), 0)(query)
        accuracy[name] = (answer.index == torch.arange(len(query))).float().mean()
    assert accuracy["trimmed L1"] == 1
    assert accuracy["Euclid"] < 0.8


def test_sparse_representation_meets_the_optimality_conditions(images):
    stored = images._replace(rows=images.rows.double())
    method = rivals.SparseRepresentation(stored, penalty=1e-2, steps=3000)
    clean = torch.nn.functional.normalize(stored.rows[::7])
    query = torch.nn.functional.normalize(ReplacedPixels(0.2).corrupt(clean, torch.Generator().manual_seed(0)))
    x, e = method.solve(query)
    residual = query - x @ method.rows - e
    for value, gradient in ((x, residual @ method.rows.mT), (e, residual)):
        assert gradient.abs().max() < 1e-2 + 1e-5
        moved = value.abs() > 1e-4
        assert moved.any()
        torch.testing.assert_close(gradient[moved], 1e-2 * value[moved].sign(), atol=1e-5, rtol=0)
    answer = method(query)
    assert torch.equal(answer.label, stored.labels[::7])
    assert torch.equal(stored.labels[answer.index], answer.label)


def test_batches_do_not_change_a_sparse_representation(images):
    query = ReplacedPixels(0.3).corrupt(images.rows, torch.Generator().manual_seed(0))
    whole = rivals.SparseRepresentation(images, steps=50)(query)
    parts = rivals.SparseRepresentation(images, steps=50, batch=7)(query)
    assert torch.equal(whole.label, parts.label)


def test_the_network_learns_and_leaves_the_random_state_alone(images):
    split = data.split_halves(images, 0)
    before = torch.get_rng_state()
    classify = rivals.convolutional(split.stored, ReplacedPixels((0.0, 0.5)), 0, steps=40, batch=32, width=8)
    assert torch.equal(torch.get_rng_state(), before)
    answer = classify(split.asked.rows)
    assert (answer.label == split.asked.labels).float().mean() > 0.9
    assert torch.equal(split.stored.labels[answer.index], answer.label)


@pytest.mark.parametrize("kind", data.LEVELS)
def test_the_adaptive_memory_finds_the_class_of_a_corrupted_image(kind, images):
    split = data.split_halves(images, 0)
    variant = data.corruption(kind, (0.0, 0.6), split.stored)
    classify = ours.adaptive(split.stored, variant, 0, ours.SETTINGS[kind]._replace(steps=8, batch=128))
    query = data.queries(split, kind, 0.5, 0)
    answer = classify(query)
    assert torch.equal(answer.label, classify.memory.classify(query))
    assert (answer.label == split.asked.labels).float().mean() > 0.9
    assert torch.equal(split.stored.labels[answer.index], answer.label)


def test_patches_agree_where_the_query_is_intact(images):
    classify = ours.AdaptiveClassifier(images, ("pixels",))
    query = images.rows[:2].clone()
    query.reshape(2, SIDE, SIDE)[:, :4, :4] = images.rows[-2:].reshape(2, SIDE, SIDE)[:, :4, :4]
    agreement = classify.agreement(query, torch.tensor([0, 1])).reshape(2, SIDE, SIDE)
    torch.testing.assert_close(agreement[:, 4:], torch.ones(2, 4, SIDE), atol=0.01, rtol=0)
    assert (agreement[:, :4, :4] < 0.9).all()


def test_views_compare_pixels_contrasts_and_patches(images):
    def dims(*views):
        return [
            [entry.count(part.score.dim) for entry in part.score.blocks]
            for part in ours.ImageSimilarity(images, views).parts
        ]

    assert dims("patches", "pixels") == [[16, 4], [64]]
    assert dims("contrasts", "diagonals", "distant") == [[56], [56], [49], [49], [48], [48]]


@pytest.mark.parametrize("offset", [each for offsets in data.OFFSETS.values() for each in offsets])
def test_contrasts_compare_each_pixel_with_the_one_at_the_offset(offset):
    image = torch.rand(3, 5, 5) + 0.1
    found = data.contrasts(image.flatten(1), 5, offset)
    pairs = [
        (image[:, i, j], image[:, i + offset[0], j + offset[1]])
        for i in range(5 - offset[0])
        for j in range(5)
        if 0 <= j + offset[1] < 5
    ]
    expected = torch.stack([(b - a) / (a + b + 2 * data.DARK) for a, b in pairs], 1)
    torch.testing.assert_close(found, expected)


def test_the_initial_score_is_the_mean_similarity_of_each_view(images):
    score = ours.ImageSimilarity(images, ("pixels", "contrasts"))
    seen = [images.rows, *(data.contrasts(images.rows, SIDE, offset) for offset in data.OFFSETS["contrasts"])]
    expected = -ours.LEVEL * sum(torch.cdist(rows, rows, p=1) / rows.shape[1] for rows in seen)
    torch.testing.assert_close(score(images.rows, images.rows), expected, atol=1e-4, rtol=1e-4)


def test_settings_are_compared_on_held_out_stored_images(folder, capsys):
    stored = data.split_halves(data.load("faces", folder), 0).stored
    held = tune.hold_out(stored)
    assert held.stored.labels.bincount().tolist() == [4] * CLASSES
    assert held.asked.labels.bincount().tolist() == [1] * CLASSES
    assert torch.equal(torch.cat([part.rows for part in held]).unique(dim=0), stored.rows.unique(dim=0))
    given = ["--data-dir", str(folder), "--device", "cpu", "--corruptions", "occlusion", "--views", "pixels", "patches"]
    tune.main([*given, "--steps", "2", "--batch", "256", "--lr", "0.1", "0.2"])
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.startswith("| p")]
    assert [line.split(" | ")[:4] for line in table] == [
        [f"| {views}", "2", "256", lr] for views in ("pixels", "patches") for lr in ("0.1", "0.2")
    ]
    with pytest.raises(SystemExit):
        tune.main(["--views", "pixels+colors"])
    assert "argument --views: expected some of pixels" in capsys.readouterr().err


def test_a_run_is_stored_reported_and_resumed(folder, tmp_path, monkeypatch, capsys):
    output = tmp_path / "rows.csv"
    options = [
        "--data",
        "faces",
        "--data-dir",
        str(folder),
        "--output",
        str(output),
        "--device",
        "cpu",
        "--splits",
        "2",
    ]
    quick = ours.Settings(("patches",), steps=2, batch=256)
    monkeypatch.setitem(measure.METHODS, ours.OURS, lambda *given: ours.adaptive(*given, quick))
    few = [*options, "--levels", "0.0", "0.3", "--rivals", "Euclid", "trimmed L1"]
    command.main(few)
    rows = read(output)
    assert len(rows) == 3 * 2 * 3  # methods, splits, two levels of pixels and one of occlusion
    assert all(0 <= float(row["accuracy"]) <= 1 for row in rows)
    text = capsys.readouterr().out
    assert "Accuracy on faces by the fraction of pixels replaced, 2 splits." in text
    assert "**" in text
    assert output.with_suffix(".png").exists()

    def fail(*arguments: object) -> None:
        raise AssertionError("a stored row was measured again")

    for name in ("Euclid", "trimmed L1", ours.OURS):
        monkeypatch.setitem(measure.METHODS, name, fail)
    command.main(few)
    assert read(output) == rows


def test_the_picture_shows_the_answer_of_each_method(folder, tmp_path, monkeypatch):
    quick = ours.Settings(("pixels", "patches"), steps=2, batch=256)
    monkeypatch.setitem(measure.METHODS, ours.OURS, lambda *given: ours.adaptive(*given, quick))
    shown = measure.answers("faces", "pixels", 0.3, ["Euclid", ours.OURS], folder, torch.device("cpu"), count=3)
    assert isinstance(shown.split, Split)
    assert shown.query.shape == (3, SIDE * SIDE)
    assert shown.split.asked.labels.tolist() == [0, 1, 3]
    assert list(shown.answers) == ["Euclid", ours.OURS]
    assert shown.agreement.shape == shown.query.shape
    assert command.report.draw_answers(shown, tmp_path / "answers.png").stat().st_size > 0


def test_reports_name_the_best_methods_and_their_times():
    figures = {"CNN": (0.9, 0.5), ours.OURS: (0.9, 0.7), "Euclid": (0.8, 0.1)}
    rows = [
        {"data": "faces", "kind": "pixels", "split": split, "method": method, "level": level, "queries": "200"}
        | {"accuracy": str(accuracy + shift), "fit_s": "3", "query_s": "0.5"}
        for split, shift in (("0", -0.05), ("1", 0.05))
        for method, accuracies in figures.items()
        for level, accuracy in zip(("0.0", "0.5"), accuracies, strict=True)
    ]
    text = command.report.accuracy_table(rows)
    assert f"| {ours.OURS} | **0.900 ± 0.071** | **0.700 ± 0.071** |" in text
    assert text.endswith(f"Highest accuracy: CNN at 0.0; {ours.OURS} at 0.0, 0.5.")
    assert "| CNN | 3 | **2.5** |" in command.report.time_table(rows)


def test_unknown_levels_and_missing_files_are_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(["--levels", "0.55"])
    assert "argument --levels: expected some of" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="expected the data set faces"):
        command.main(["--data", "faces", "--data-dir", str(tmp_path)])
