"""The bag example: bags of digits, feature files intact and damaged, a resumed run, its files and pictures."""

import csv
import re

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from examples import mil
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
            save(home / f"slide{number}{endings[number % len(endings)]}", instances)
            file.write(f"slide{number},{label}\n")
    return home


def save(path, instances):
    if path.suffix == ".pt":
        torch.save({"features": instances, "coords": torch.zeros(len(instances), 2)}, path)
    elif path.suffix == ".npy":
        np.save(path, instances.numpy())
    elif path.suffix == ".npz":
        np.savez(path, features=instances.numpy(), coords=np.zeros((len(instances), 2)))
    else:
        h5py = pytest.importorskip("h5py", reason="h5py is not installed: .h5 files cannot be written or read")
        with h5py.File(path, "w") as file:
            file["features"], file["coords"] = instances.numpy(), np.zeros((len(instances), 2))


def command(home, out, epochs=2):
    where = ["--data", "folder", "--data-dir", str(home), "--out", str(out)]
    return [*where, "--batch-size", "4", "--lr", "1e-2", "--epochs", str(epochs)]


def test_what_a_run_writes_and_a_resumed_run_continues(tmp_path):
    home = slides(tmp_path, bags=40, signal=6.0)
    save(home / "slide0.pt", torch.empty(0, 6))  # an empty bag among the others
    out = tmp_path / "out"
    assert mil.main(command(home, out, epochs=1))["adaptive"]["epochs"] == 1
    found = mil.main([*command(home, out, epochs=4), "--resume"])["adaptive"]
    assert found["epochs"] == 4
    assert found["test_auc"] > 0.8
    steps = [row["step"] for path in sorted(out.rglob("metrics.csv")) for row in csv.DictReader(path.open())]
    assert steps.count("0") == 1  # the second run did not start again
    with (out / "adaptive" / "instances.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    weights = [float(row["weight"]) for row in rows if row["bag"] == rows[0]["bag"]]
    assert weights == sorted(weights, reverse=True)
    assert sum(weights) == pytest.approx(1, abs=1e-4)


def test_slides_with_ids_of_three_classes_with_names(tmp_path):
    names, generator = ["normal", "lumA", "lumB"], torch.Generator().manual_seed(0)
    rows = ["case_id,slide_id,label"]
    for number in range(45):
        instances = torch.randn(0 if number == 7 else 5, 6, generator=generator)
        instances[:2, number % 3] += 6
        save(tmp_path / f"S.{number}.npy", instances)
        rows.append(f"case,S.{number},{names[number % 3]}")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    found = mil.main(command(tmp_path, tmp_path / "out", epochs=4))["adaptive"]
    assert found["test_auc"] > 0.8
    with (tmp_path / "out" / "adaptive" / "instances.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            assert row["label"] == names[int(row["bag"][2:]) % 3]
            assert sum(float(row[f"probability {name}"]) for name in names) == pytest.approx(1, abs=1e-3)


def test_bags_of_digits_share_none_and_are_damaged_by_the_seed():
    clean, damaged, other = (mil.digit_bags(*settings) for settings in ((0.0, 0), (0.5, 1), (0.5, 2)))
    pixels, classes = load_digits(return_X_y=True)
    number = {tuple(row): place for place, row in enumerate((pixels / 16).tolist())}
    held = [{number[tuple(row)] for row in clean.read(bag).tolist()} for bag in range(len(clean.labels))]
    assert [float(any(classes[digit] == 9 for digit in bag)) for bag in held] == clean.labels.tolist()
    train, test = (set.union(*(held[bag] for bag in part)) for part in clean.parts)
    stored = {number[tuple(row)] for row in clean.clean.tolist()}
    assert not train & test
    assert not stored & (train | test)
    changed = (damaged.read(3) != clean.read(3)).sum(1)
    assert ((changed > 20) & (changed <= 32)).all()  # half of 64 pixels, by other values
    assert not torch.equal(damaged.read(3), other.read(3))


def test_digits_are_drawn_by_weight():
    data = mil.digit_bags(0.0, 0)
    found = {bag: (torch.randn(1, 2), torch.rand(len(data.read(bag)))) for bag in data.parts[1]}
    figure = mil.draw_digits(data, found)
    first = next(bag for bag in data.parts[1] if data.labels[bag] == 1)
    order = found[first][1].argsort(descending=True)[:10]
    for axis, place in zip(figure.axes, order, strict=False):
        assert axis.get_title() == f"{found[first][1][place]:.2f}"
        np.testing.assert_array_equal(axis.images[0].get_array(), data.read(first)[place].reshape(8, 8))


def test_csv_of_instances(tmp_path):
    path = tmp_path / "bags.csv"
    path.write_bytes("bag,label,a,b\nx,1,0.5,1\ny,0,2,3\nx,1,4,5\n".encode("utf-8-sig"))  # with a byte order mark
    data = mil.csv_bags(tmp_path)
    assert (data.names, data.labels.tolist()) == (["x", "y"], [1.0, 0.0])
    assert data.read(0).tolist() == [[0.5, 1.0], [4.0, 5.0]]
    label, finite = "with one label per bag, got bag 'x', label '0'", "finite features, got .*in bag 'x'"
    for text, rule in (("x,1,1\nx,0,1", label), ("y,0,2\nx,1,1e39", finite), ("y,0,1\nx,1,big", finite)):
        path.write_text(f"bag,label,a\n{text}\n")
        refuses(rf"bags\.csv, line 3: expected .*{rule}", mil.csv_bags, path)
    path.write_text("bag,label,a\ny,0,1\nx,1,1,2\n")
    refuses(rf"bags\.csv, line 3: expected {finite}", mil.csv_bags, path)


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda home: (home / "slide3.npz").unlink(), r"slide3\.pt: expected finite features .*FileNotFound"),
    (lambda home: (home / "slide3.npz").write_bytes(b"PK"), r"slide3\.npz: expected finite features"),
    (lambda home: save(home / "slide4.pt", torch.zeros(3, 7)), r"same number of features in all bags, got \{6, 7\}"),
    (lambda home: save(home / "slide4.pt", torch.zeros(3)), r"slide4\.pt: .*an array \(3,\)"),
    (lambda home: torch.save({"a": 1, "b": 2}, home / "slide4.pt"), r"slide4\.pt: expected finite features"),
    (lambda home: (home / "labels.csv").write_text("bag,label\nslide1,2\n"), r".*two classes, got \['2'\]"),
    (lambda home: (home / "labels.csv").write_text("slide,label\nslide1,2\n"), r"labels\.csv, line 2: .*got bag None"),
    (lambda home: (home / "labels.csv").write_text("bag,label\nslide1,a\nslide2,b\n"), "least populated"),
    (lambda home: (home / "labels.csv").write_bytes(b"bag,label\n\xe9,1\n"), "can't decode byte"),
    (lambda home: (home / "labels.csv").unlink(), r"No such file .*labels\.csv"),
])  # fmt: skip
def test_damaged_data_are_named_before_anything_is_written(tmp_path, spoil, message, refused):
    home = slides(tmp_path, bags=10)
    spoil(home)
    assert re.search(f"error: .*{message}", refused(mil.main, *command(home, tmp_path / "out"), usage=False))
    assert not (tmp_path / "out").exists()


def test_feature_files_are_read_and_checked(tmp_path):
    home = slides(tmp_path, bags=10)
    save(home / "slide3.npz", torch.full((2, 6), 1e300, dtype=torch.double))
    data = mil.folder_bags(home)
    assert data.read(2).shape == (6, 6)
    refuses(r"slide3\.npz: expected finite features .*infinity in float32", data.read, 3)
    save(home / "slide1.h5", torch.zeros(5, 6))
    assert mil.read_features(home / "slide1.h5").shape == (5, 6)
