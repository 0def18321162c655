"""The benchmark of lookup layers: a small run of all networks, and what a lookup reads."""

import gzip

import numpy as np
import pytest
import torch

import ahop_layers as ah
from benchmarks.harness.rows import read
from benchmarks.paper.lookup import __main__ as command
from benchmarks.paper.lookup import measure, networks
from benchmarks.paper.lookup.layer import Lookup
from benchmarks.search import data

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Random faces of 8 x 8 pixels and random digits, in the files of the benchmark."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (folder / "faces").mkdir()
    images = random.integers(0, 256, (24, 8, 8), dtype=np.uint8)
    np.savez(folder / data.FACES, images=images, labels=np.arange(24) % 3)
    (folder / "mnist").mkdir()
    pixels, classes = data.files("digits", folder)
    pixels.write_bytes(gzip.compress(bytes(16) + random.bytes(12_000 * 784), 1))
    classes.write_bytes(gzip.compress(bytes(8) + bytes(number % 10 for number in range(12_000)), 1))
    return folder


@pytest.mark.full
def test_all_networks_are_measured(home, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure, "STORED", 20)
    arguments = ["--quick", "--seeds", "1", "--device", "cpu", "--data-dir", str(home)]
    command.main([*arguments, "--output", str(tmp_path / "rows.csv")])
    rows = read(tmp_path / "rows.csv")
    found = {(row["part"], row["damage"], row["network"]) for row in rows}
    assert len(found) == 2 * len(networks.FACE_NETWORKS) + 2 * len(measure.BAG_NETWORKS)
    assert all(0 <= float(row["value"]) <= 1 for row in rows)
    text = capsys.readouterr().out
    assert "| pixels replaced | 90 % |" in text
    assert "| 70 % |" in text


def test_a_lookup_reads_stored_values_and_leaves_instances_out():
    stored = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    lookup = Lookup(stored, keep=1.0, blocks=[3, ah.Blocks(2, normalize=True)])
    assert (lookup(stored) - stored).abs().max() < 0.1
    other = lookup(stored, without=torch.arange(20))
    assert ((other - stored).abs().amax(1) > 0.1).all()
    trained = [name.rpartition(".")[2] for name, each in lookup.named_parameters() if each.requires_grad]
    assert sorted(trained) == ["beta", "beta", "scaling", "w", "w"]


@pytest.mark.full
def test_a_repaired_bag_is_read_by_a_network_of_clean_bags(tmp_path, monkeypatch, small_fit):
    generator, classes = torch.Generator().manual_seed(0), np.arange(11_000) % 10
    digits = torch.rand(10, 784, generator=generator)[classes] + 0.02 * torch.rand(11_000, 784, generator=generator)
    monkeypatch.setattr(measure, "load", lambda *_: (digits, torch.from_numpy(classes), None))
    monkeypatch.setattr(measure, "STORED", 100)
    size, device = measure.Size(bags=(150, 40), epochs=4), torch.device("cpu")
    found = {
        name: measure.measure(measure.Measurement("bags", "pixels 0.7", name, 0, ""), tmp_path, size, device)["auc"]
        for name in ("none", "repair")
    }
    assert found["repair"] > 0.95 > 0.8 > found["none"]
