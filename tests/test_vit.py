"""The vision transformer example: conversion and pictures; the image benchmark: kernels and a small run."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ahop_layers as ah
from benchmarks.harness.rows import read
from benchmarks.paper.images import __main__ as images
from benchmarks.paper.images import training
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


def test_patches_are_repaired_in_their_places(small_fit):
    places = torch.linspace(0, 1, 16)
    colors = torch.rand(60, 3, 1, 1, generator=torch.Generator().manual_seed(0))
    photos = (colors * places[:, None] + (1 - colors) * places) / 2  # smooth
    repair = training.repaired(photos[:50], 0)
    clean, wrong, found, median = (
        each(photos[50:], share, torch.Generator().manual_seed(1)) - photos[50:]
        for each, share in ((repair, 0.0), (training.replaced, 0.5), (repair, 0.5), (training.filtered, 0.5))
    )
    assert (clean != 0).double().mean() < 0.05  # patches of a color unlike all stored ones
    assert clean.square().mean() < 0.2 * found.square().mean()
    assert found.square().mean() < 0.5 * median.square().mean() < 0.5 * wrong.square().mean()
    assert (wrong != 0).flatten(1).sum(1).tolist() == [3 * 16 * 16 // 2] * 10


@pytest.mark.full
def test_image_benchmark(tmp_path, capsys, small_fit):
    def run(options):
        images.main([*options.split(), "--output", str(tmp_path / "images.csv")])
        return capsys.readouterr().out

    attentions, common = ["dot", "adaptive:last=1,lr=0.1"], "--data digits --model tiny --device cpu --batch"
    run(f"working {common} 256 --seeds 1 --epochs 2 --attentions {' '.join(attentions)}")
    run(f"throughput {common} 4 --seconds 0.01")
    assert "| dot | 70% | " in run(f"repair {common} 256 --seeds 1 --epochs 2")
    rows = read(tmp_path / "images.csv")
    assert [row["attention"] for row in rows if row["measure"] == "accuracy"] == [*attentions, "dot"]
    clean = {
        row["value"] for row in rows if row["measure"] in ("accuracy", "as it is 0.0") and row["setup"] == "repair"
    }
    assert len(clean) == 1
    assert all(float(row["value"]) > 0 for row in rows if row["setup"].startswith("throughput"))
    assert "| none | " in run("report")
