"""The vision transformer example and the image benchmark: data sets, attentions, conversion, pictures."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ahop_layers as ah
from benchmarks import images as vit_data
from benchmarks.harness.rows import read
from benchmarks.paper.images import __main__ as images
from benchmarks.paper.images import measure as images_measure
from benchmarks.paper.images import model as image_model
from benchmarks.paper.images import training as images_training
from benchmarks.paper.kernel_similarity import KernelSimilarity
from benchmarks.paper.retrieval.systems import ReferenceSimilarity
from examples import vit
from tests.samples import refuses

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path):
    """A folder of images of two classes, which must be resized."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 12), ("test", 4)):
        for name, color in (("cold", (20, 40, 200)), ("warm", (220, 60, 30))):
            home = tmp_path / part / name
            home.mkdir(parents=True)
            for number in range(count):
                pixels = rng.normal(color, 30, (30, 40 + number, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(home / f"{number}.png")
    return tmp_path


@pytest.fixture
def cifar10(tmp_path):
    """CIFAR-10 of random pixels in the published file layout."""
    home, rng = tmp_path / "cifar-10-batches-py", np.random.default_rng(0)
    home.mkdir()
    for part in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        batch = {b"data": rng.integers(0, 256, (8, 3072)).astype(np.uint8), b"labels": list(range(8))}
        (home / part).write_bytes(pickle.dumps(batch, protocol=2))
    names = {b"label_names": [f"c{number}".encode() for number in range(10)]}
    (home / "batches.meta").write_bytes(pickle.dumps(names, protocol=2))
    return home


def command(folder, out, *more):
    """Arguments of a short training on a folder of images: 22 training images, six steps per epoch."""
    where = ["--data-dir", str(folder), "--batch-size", "4", "--out", str(folder / out), "--epochs", "1"]
    return [*where, *more]


def test_conversion_keeps_the_logits(folder, monkeypatch):
    monkeypatch.setattr(vit, "draw", lambda *_: None)
    found = vit.main(command(folder, "dot", "--attention", "dot", "--epochs", "2"))["dot"]
    assert found["test_accuracy"] == 1.0
    tuned = vit.main(command(folder, "tuned", "--convert", found["checkpoint"], "--lr", "1e-4"))
    assert tuned["dot"]["logit_change"] == 0.0
    assert tuned["adaptive"]["logit_change"] < 1e-5
    restored = vit.Classifier.load_from_checkpoint(tuned["adaptive"]["checkpoint"])
    counts = {w.shape[-1] for name, w in restored.named_parameters() if name.endswith("similarity.w")}
    assert counts == {4}
    images = torch.rand(2, 3, 32, 32)
    classifier, change = vit.convert(Path(found["checkpoint"]), "adaptive", None, 0.5, images)
    assert change < 1e-5 < classifier.model(images).std()
    assert classifier.hparams.lr == 0.5
    refuses(
        r"dot-product attention, got 'adaptive'", vit.convert, tuned["adaptive"]["checkpoint"], "dot", 4, 1.0, images
    )
    refuses("expected a checkpoint of this model", vit.convert, found["checkpoint"], "dot", 4, 1.0, images[:, :1])


def test_maps_show_predictions_and_the_dot_product():
    model = vit.VisionTransformer(channels=1, side=4, classes=3, patch=2, size=(2, 8, 2)).eval()
    ah.adapt_(model, blocks=2)
    images = torch.rand(2, 1, 4, 4)
    before = [*ah.association_maps(model, images).values()][-1]
    for part in ah.similarity_parameters(model):
        torch.nn.init.normal_(part)
    after = ah.association_maps(model, images).values()
    *axes, _ = vit.maps(model, images, [("cat", "cat"), ("cat", "dog")]).axes
    assert [axis.get_title() for axis in axes[:2]] == [
        "true cat\npredicted cat \u2713",
        "true cat\npredicted dog \u2717",
    ]
    for place, weights in enumerate([*after, before], 1):
        for column in range(2):
            shown = axes[2 * place + column].images[-1].get_array()
            np.testing.assert_allclose(shown.flatten(), weights[column].mean(0)[0, 1:], rtol=1e-4)


def test_published_files_are_read_and_damaged_ones_named(cifar10):
    data = vit_data.load("cifar10", cifar10.parent)
    first = pickle.loads((cifar10 / "data_batch_1").read_bytes())
    assert data.train.images[0].flatten().tolist() == first[b"data"][0].tolist()
    assert (len(data.train.labels), len(data.test.labels), data.classes[3]) == (40, 8, "c3")
    for content in (b"\xff\xfe\xfa" * 9, pickle.dumps(os.getcwd)):  # the second one would run code
        (cifar10 / "data_batch_1").write_bytes(content)
        refuses(r"^cifar10: expected files as published in .*, got damaged", vit_data.load, "cifar10", cifar10.parent)


def test_augmentation_shifts_and_flips_every_image_independently():
    images = torch.zeros(400, 1, 16, 16, dtype=torch.uint8)
    images[:, :, 8, 5] = 1
    moved = image_model.augment(images, mirror=True)
    assert (moved.sum((1, 2, 3)) == 1).all()
    rows, columns = moved.nonzero()[:, 2:].T
    assert set(rows.tolist()) == set(range(6, 11))
    assert set(columns.tolist()) == set(range(3, 8)) | set(range(8, 13))
    kept = image_model.augment(images, mirror=False).nonzero()[:, 3]
    assert set(kept.tolist()) == set(range(3, 8))


def test_kernels_learn_from_the_separation_loss_alone():
    kernel = KernelSimilarity(6, num_heads=2)
    query, key = torch.randn(3, 2, 5, 6), torch.randn(3, 2, 4, 6, requires_grad=True)
    scores = kernel(query, key)
    torch.testing.assert_close(scores, query @ key.mT)  # the identity at the start
    task = torch.autograd.grad(scores.square().sum(), [key, kernel.phi], retain_graph=True, allow_unused=True)
    apart = torch.autograd.grad(kernel.separation_loss, [key, kernel.phi], allow_unused=True)
    assert [grad is None for grad in (*task, *apart)] == [False, True, True, False]
    unit = torch.nn.functional.normalize(key.detach(), dim=-1).flatten(0, 1)
    pairs = torch.stack([torch.pdist(head) for head in unit])
    torch.testing.assert_close(kernel.separation_loss, (-2 * pairs.square()).exp().mean(-1).log().mean())


@pytest.mark.full
def test_throughput_benchmark(tmp_path, capsys):
    small = "throughput --data digits --model tiny --batch 4 --seconds 0.01 --device cpu"
    command = [*small.split(), "--output", str(tmp_path / "images.csv")]
    images.main(command)
    rows = read(tmp_path / "images.csv")
    assert {row["attention"] for row in rows} == {*images_measure.ATTENTIONS, "eager"}
    assert all(float(row["value"]) > 0 and row["torch"] and row["device"] for row in rows)
    capsys.readouterr()
    images.main(command)
    assert "seed" not in capsys.readouterr().out  # nothing is measured twice


@pytest.mark.full
def test_training_benchmark(tmp_path, capsys):
    small = ["--data", "digits", "--model", "tiny", "--batch", "256", "--device", "cpu", "--seeds", "1"]

    def run(options, *more, output="images.csv"):
        images.main([*options.split(), *more, "--output", str(tmp_path / output)])
        return capsys.readouterr().out

    run("paper --epochs 1 --attentions dot --lr 3e-3 1e-3", *small, output="rates.csv")
    rates = [row["settings"].rpartition(", lr ")[2] for row in read(tmp_path / "rates.csv")]
    assert rates == ["0.003", "0.001"]
    assert "would not end" in run("working --epochs 20 --minutes 0", *small)
    assert not (tmp_path / "images.csv").exists()
    run("working --epochs 2 --attentions dot adaptive", *small)
    rows = read(tmp_path / "images.csv")
    assert [row["attention"] for row in rows if row["measure"] == "accuracy"] == ["dot", "adaptive"]
    assert (tmp_path / "images.png").exists()  # beside the rows
    shown = run("report", "--picture", str(tmp_path / "drawn.svg"))
    assert "fraction of masked patches" in (tmp_path / "drawn.svg").read_text()
    assert "| none | " in shown


@pytest.mark.parametrize(("attention", "check"), [
    ("adaptive:last=1,lr=0.1", lambda similarity: similarity.w.shape == (2, 2, 32)),
    ("adaptive:blocks=4,lr=0.1", lambda similarity: similarity.w.shape == (2, 2, 4)),
    ("adaptive:debias,init=dis,shared,lr=0.1", lambda it: it.num_heads is None and it.init == "dis"),
    ("eager:debias,lr=0.1", lambda similarity: isinstance(similarity, ReferenceSimilarity)),
])  # fmt: skip
def test_changes_of_an_attention(attention, check):
    data = vit_data.load("digits", Path())
    setup = images_training.Setup("tiny", 1, 8, ("dot",))
    model, factor = images_training.build(attention, setup, data, image_model.channel_scale(data.train.images))
    assert factor == 0.1
    layers = [layer for layer in model.modules() if isinstance(layer, ah.AdaptiveAttention)]
    assert len(layers) == (1 if "last=1" in attention else 2)
    assert all(check(layer.similarity) for layer in layers)
    assert all(layer.similarity.bias is not None for layer in layers if "debias" in attention)
    optimizer = images_training.make_optimizer(model, 1.0, 0.05, factor)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.1]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
