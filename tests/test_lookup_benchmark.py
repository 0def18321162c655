"""The benchmark of lookup layers: networks, rows, tables, and splits of the data."""

import gzip

import numpy as np
import pytest
import torch

import ahop_layers as ah
from benchmarks.harness.rows import read
from benchmarks.paper.lookup import __main__ as command
from benchmarks.paper.lookup import measure, networks
from benchmarks.paper.lookup.layer import Lookup

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Random faces of 8 x 8 pixels and random digits, in the files of the benchmark."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (folder / "faces").mkdir()
    images = random.integers(0, 256, (24, 8, 8), dtype=np.uint8)
    np.savez(folder / measure.FACES, images=images, labels=np.arange(24) % 3)
    (folder / "mnist").mkdir()
    (folder / measure.DIGITS[0]).write_bytes(gzip.compress(bytes(16) + random.bytes(12_000 * 784), 1))
    (folder / measure.DIGITS[1]).write_bytes(
        gzip.compress(bytes(8) + bytes(number % 10 for number in range(12_000)), 1)
    )
    return folder


@pytest.mark.full
def test_all_networks_are_measured_once(home, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure, "STORED", 20)
    arguments = ["--quick", "--seeds", "1", "--device", "cpu", "--data-dir", str(home), "--output"]
    command.main([*arguments, str(tmp_path / "rows.csv")])
    rows = read(tmp_path / "rows.csv")
    found = {(row["part"], row["damage"], row["network"]) for row in rows}
    assert len(found) == 2 * len(networks.FACE_NETWORKS) + 2 * len(measure.BAG_NETWORKS)
    assert all(0 <= float(row["value"]) <= 1 for row in rows)
    text = capsys.readouterr().out
    assert "| pixels replaced | 90 % |" in text
    assert "| 70 % |" in text
    monkeypatch.setattr(command, "measure", lambda *_: pytest.fail("measured again"))
    command.main([*arguments, str(tmp_path / "rows.csv")])
    assert read(tmp_path / "rows.csv") == rows


def test_half_of_each_person_is_stored():
    labels = torch.arange(30) % 3
    chosen = measure.half_of_each(labels, 0)
    assert labels[chosen].bincount().tolist() == [5, 5, 5]
    assert not torch.equal(chosen, measure.half_of_each(labels, 1))


@pytest.mark.parametrize("name", ["lookup", "lookup and cnn"])
def test_a_network_with_a_lookup_starts_as_the_lookup(name):
    torch.manual_seed(0)
    stored, labels = torch.rand(20, 256), torch.arange(20) % 4
    model = networks.FaceClassifier(name, stored, labels, 16, "pixels").eval()
    with torch.no_grad():
        assert torch.allclose(model(stored), (model.lookup(stored) + 1e-3).log())
        assert (model(stored).argmax(1) == labels).all()
        left_out = model(stored, torch.arange(20))
        assert not torch.allclose(left_out, model(stored))


def test_training_changes_the_lookup_and_the_rest():
    torch.manual_seed(0)
    stored, labels = torch.rand(20, 256), torch.arange(20) % 4
    model = networks.FaceClassifier("lookup", stored, labels, 16, "pixels")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    networks.train_faces(model, stored, labels, measure.damage("pixels", (0.0, 0.5), 16), 3, 0)
    after = model.state_dict()
    assert set(after) == set(before)
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {"lookup.layer.lookup_weights", "lookup.layer.target_weights"} <= same
    assert not {name for name in same if name.startswith("head.3") or ".w_" in name or name.endswith("scaling")}


def test_a_lookup_reads_stored_values_and_leaves_instances_out():
    stored = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    lookup = Lookup(stored, keep=1.0, blocks=[3, ah.Blocks(2, normalize=True)])
    assert (lookup(stored) - stored).abs().max() < 0.1
    other = lookup(stored, without=torch.arange(20))
    assert ((other - stored).abs().amax(1) > 0.1).all()
    trained = [name.rpartition(".")[2] for name, each in lookup.named_parameters() if each.requires_grad]
    assert sorted(trained) == ["beta", "beta", "scaling", "w", "w"]
