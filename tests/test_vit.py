"""The vision transformer example and the image benchmark: data sets, attentions, interruptions, pictures."""

import gzip
import io
import json
import os
import pickle
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

import ahop_layers as ah
from benchmarks import images as vit_data
from benchmarks.harness.rows import read
from benchmarks.paper.images import __main__ as images
from benchmarks.paper.images import measure as images_measure
from benchmarks.paper.images import training as images_training
from benchmarks.paper.kernel_similarity import KernelSimilarity
from benchmarks.paper.retrieval.systems import ReferenceSimilarity
from examples import demo, mil, vit
from examples.vision import batches as vit_batches
from examples.vision import model as vit_model
from examples.vision import pictures as vit_pictures
from tests.samples import refuses

ROOT = Path(__file__).parents[1]
TINY = ["--model", "tiny", "--accelerator", "cpu"]
FAST = [*TINY, "--fast-dev-run", "--batch-size", "16"]

pytestmark = pytest.mark.slow


@pytest.fixture
def no_pictures(monkeypatch):
    """Leaves out the pictures, which take most of the time of a short run."""
    monkeypatch.setattr(vit, "draw_pictures", lambda *_: [])


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


BATCHES = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
CIFAR = {
    "cifar10": ("cifar-10-batches-py", b"label", BATCHES, "batches.meta"),
    "cifar100": ("cifar-100-python", b"fine_label", ["train", "test"], "meta"),
}


@pytest.fixture
def made(tmp_path, request):
    """A data set of random pixels in the published file layout."""
    rng = np.random.default_rng(0)

    def write(path, content):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)

    if request.param == "mnist":
        for name in vit_data.MNIST_FILES:
            shape = (8, 28, 28) if "images" in name else (8,)
            head = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">i4").tobytes()
            pixels = rng.integers(0, 10, shape).astype(np.uint8).tobytes()
            write(f"MNIST/raw/{name}", gzip.compress(head + pixels))
    elif request.param == "tiny-imagenet":
        image = io.BytesIO()
        Image.new("RGB", (64, 64)).save(image, "JPEG")
        for path in [*(f"train/{name}/images/{n}" for name in ("n1", "n2") for n in range(6)), "val/images/v"]:
            write(f"tiny-imagenet-200/{path}.JPEG", image.getvalue())
        write("tiny-imagenet-200/wnids.txt", b"n2\nn1\n")
        write("tiny-imagenet-200/val/val_annotations.txt", b"v.JPEG\tn2\t0\t0\t9\t9\n")
    else:
        folder, key, parts, meta = CIFAR[request.param]
        for part in parts:
            batch = {b"data": rng.integers(0, 256, (8, 3072)).astype(np.uint8), key + b"s": list(range(8))}
            write(f"{folder}/{part}", pickle.dumps(batch, protocol=2))
        names = {key + b"_names": [f"c{number}".encode() for number in range(10)]}
        write(f"{folder}/{meta}", pickle.dumps(names, protocol=2))
    return request.param, tmp_path


def test_what_a_run_on_digits_writes(tmp_path):
    vit.main([*FAST, "--out", str(tmp_path / "out")])
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"maps.png", "weights.png", "confusion.png", "results.json", "options.txt"}


@pytest.mark.parametrize("made", ["mnist", "cifar10", "cifar100", "tiny-imagenet"], indirect=True)
def test_data_sets_in_their_published_layout_and_damaged(made):
    name, where = made
    data = vit_data.load(name, where)
    assert data.train.images.dtype == torch.uint8
    assert data.train.images.ndim == 4
    assert len(data.train.images) == len(data.train.labels) > 0
    if name == "cifar10":
        first = pickle.loads((where / "cifar-10-batches-py" / "data_batch_1").read_bytes())
        assert data.train.images[0].flatten().tolist() == first[b"data"][0].tolist()
        assert data.classes[3] == "c3"
    if name == "tiny-imagenet":
        assert data.test.labels.tolist() == [1]  # classes are sorted by name
    files = [path for path in sorted(where.rglob("*")) if path.is_file()]
    for path in (files[0], files[-1]):
        content = path.read_bytes()
        path.write_bytes(b"\xff\xfe\xfa" * 9)
        refuses(rf"^{name}: expected files as published in .*, got damaged ones \(", vit_data.load, name, where)
        path.write_bytes(content)


def on_folder(folder, out, *more):
    """Arguments of a short training on a folder of images: 22 training images, five steps per epoch."""
    where = ["--data", "folder", "--data-dir", str(folder), "--batch-size", "4", "--out", str(folder / out)]
    return [*TINY, *where, "--lr", "0.003", "--epochs", "2", *more]


def test_a_folder_of_images(folder, no_pictures):
    assert vit.main(on_folder(folder, "out", "--augment"))["test_accuracy"] == 1.0


def test_missing_data_and_models_that_cannot_be_built_are_named(tmp_path, refused):
    nowhere = tmp_path / "nowhere"
    for options, message in (
        (["--data", "cifar10", "--data-dir", nowhere], r"expected the data in .*labels\.npz.*; see --data-dir"),
        (["--data", "mnist", "--data-dir", nowhere], "expected the data in .*train-images.*; see --data-dir"),
        (["--data", "folder", "--data-dir", tmp_path], r"expected images \(\.png "),
        (["--patch", 3], "patch must divide the image, got patch 3 and image 8 x 8"),
        (["--blocks", 3], r"blocks\.layers\.0\.self_attn: "),
    ):
        assert re.match(f"vit: error: {message}", refused(vit.main, *TINY, *options, "--out", tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    few, none = (vit_data.Images(torch.zeros(n, 1, 8, 8), torch.zeros(n)) for n in (1, 0))
    with pytest.raises(ah.AHopError, match="expected at least 2 training images and 1 test image, got 1 and 0"):
        vit_batches.ImageBatches(vit_data.ImageSet(few, none, ["a"]), 4, 0, False)


def test_a_pickle_with_code_is_refused(tmp_path):
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(os.getcwd))
    with pytest.raises(pickle.UnpicklingError, match=r"got posix\.getcwd"):
        vit_data.load_plain(path)


@pytest.mark.parametrize("made", ["cifar100"], indirect=True)
def test_a_download_is_unpacked_or_its_failure_named(made, tmp_path, monkeypatch):
    name, where = made
    archive = tmp_path / "cifar-100-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(where / "cifar-100-python", "cifar-100-python")
    monkeypatch.setitem(vit_data.SOURCES, name, [archive.as_uri()])
    target = tmp_path / "fresh"
    data = vit_data.load(name, target, download=True)
    assert torch.equal(data.test.images, vit_data.load(name, where).test.images)
    assert [path.name for path in target.iterdir()] == ["cifar-100-python"]
    archive.unlink()
    with pytest.raises(ah.AHopError, match=r"cifar-100-python\.tar\.gz: expected a file to download, got "):
        vit_data.load(name, tmp_path / "other", download=True)
    assert not list((tmp_path / "other").iterdir())


def test_an_epoch_uses_every_image_once_with_any_number_of_processes():
    data = vit_data.Images(torch.arange(40, dtype=torch.uint8).reshape(40, 1, 1, 1), torch.arange(40))

    def labels(steps, rank=0, world=1, mirror=None):
        batches = vit_batches.Batches(data, 8, 3, lambda: steps, rank, world, mirror)
        return [label.tolist() for _, label in batches]

    first, second = labels(0), labels(5)
    for batches in (first, second):
        assert sorted(label for batch in batches for label in batch) == list(range(40))
    assert first != second  # each epoch has its own order
    assert labels(7) == second[2:]  # in the middle of the second epoch
    shares = [labels(0, rank, 2) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*shares, strict=True)] == [sorted(batch) for batch in first]
    refuses("a multiple of the 3 processes, got 8", labels, 0, 0, 3)


def test_augmentation_shifts_and_flips_every_image_independently():
    images = torch.zeros(400, 1, 16, 16, dtype=torch.uint8)
    images[:, :, 8, 5] = 1
    moved = vit_batches.augment(images, mirror=True)
    assert (moved.sum((1, 2, 3)) == 1).all()
    rows, columns = moved.nonzero()[:, 2:].T
    assert set(rows.tolist()) == set(range(6, 11))
    assert set(columns.tolist()) == set(range(3, 8)) | set(range(8, 13))
    kept = vit_batches.augment(images, mirror=False).nonzero()[:, 3]
    assert set(kept.tolist()) == set(range(3, 8))


def weights(path):
    return torch.load(path, weights_only=True)["state_dict"]


@pytest.mark.full
def test_two_processes_train_like_one(folder):
    # In float64, because Adam turns the rounding error of a zero gradient into a full step.
    precise = ["--precision", "64-true"]
    one = vit.main(on_folder(folder, "one", *precise))
    command = [sys.executable, "-m", "examples.vit", *on_folder(folder, "two", *precise)]
    subprocess.run([*command, "--devices", "2", "--strategy", "ddp"], cwd=ROOT, check=True, capture_output=True)
    two = json.loads((folder / "two" / "results.json").read_text())
    assert two["test_loss"] == pytest.approx(one["test_loss"], rel=1e-6)
    assert two["test_accuracy"] == pytest.approx(one["test_accuracy"])
    single, double = (weights(folder / name / "best.ckpt") for name in ("one", "two"))
    torch.manual_seed(0)  # as in the example
    start = vit_model.VisionTransformer((3, 32, 32), 2, 4, **vit_model.MODELS["tiny"]).embed.weight
    assert 1e-3 < (single["model.embed.weight"] - start).abs().max() < 0.05  # ten steps of at most 0.003
    for name, value in single.items():
        torch.testing.assert_close(double[name], value, rtol=1e-7, atol=1e-9)


class Interrupter(vit.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            raise RuntimeError("interrupted")


def test_an_interrupted_run_resumes_in_the_middle_of_an_epoch(folder, no_pictures):
    options = ("--augment", "--save-every", "2", "--epochs", "1")
    with pytest.raises(RuntimeError, match="interrupted"):
        vit.main(on_folder(folder, "parts", *options), [Interrupter()])
    resumed = vit.main(on_folder(folder, "parts", *options, "--resume"))  # without --overwrite: its own folder
    assert resumed == vit.main(on_folder(folder, "whole", *options))


def test_maps_show_predictions_and_the_dot_product():
    model = vit_model.VisionTransformer((1, 4, 4), classes=3, patch=2, depth=2, width=8, heads=2).eval()
    ah.adapt_(model, blocks=2)
    images = torch.rand(2, 1, 4, 4)
    before = list(ah.association_maps(model, images).values())[-1]
    for part in ah.similarity_parameters(model):
        torch.nn.init.normal_(part)
    after = ah.association_maps(model, images).values()
    *axes, _ = vit_pictures.maps(model, images, [("cat", "cat"), ("cat", "dog")]).axes
    for place, weights in enumerate([*after, before], 1):
        for column in range(2):
            shown = axes[2 * place + column].images[-1].get_array()
            np.testing.assert_allclose(shown.flatten(), weights[column].mean(0)[0, 1:], rtol=1e-4)


def test_conversion_keeps_the_logits(folder, no_pictures):
    vit.main(on_folder(folder, "dot", "--attention", "dot", "--epochs", "1"))
    checkpoint, images = folder / "dot" / "best.ckpt", torch.rand(32, 3, 32, 32)

    def block_counts(model):
        return {w.shape[-1] for name, w in model.named_parameters() if name.endswith("similarity.w")}

    for blocks, count in ((8, 8), (None, 32)):
        classifier, change = vit.convert(checkpoint, "adaptive", images, blocks=blocks, lr=0.5)
        assert change < 1e-5 < classifier.model(images).std()
        assert classifier.training
        assert classifier.hparams.lr == 0.5
        assert block_counts(classifier) == {count}
    tuned = vit.main(on_folder(folder, "tuned", "--convert", str(checkpoint), "--epochs", "1"))
    assert tuned["logit_change"] < 1e-5
    restored = vit.Classifier.load_from_checkpoint(folder / "tuned" / "best.ckpt")  # 4 blocks by default
    assert block_counts(restored) == {4}
    refuses("dot-product attention, got 'adaptive'", vit.convert, folder / "tuned" / "best.ckpt", "adaptive", images)


def test_a_checkpoint_that_cannot_be_converted_is_named(folder, no_pictures, refused):
    vit.main(on_folder(folder, "run", "--attention", "dot", "--save-every", "5", "--epochs", "1"))
    path, where = folder / "run" / "last.ckpt", on_folder(folder, "run", "--attention", "dot")
    content, held = path.read_bytes(), torch.load(path, weights_only=True)

    def is_refused(*options):
        last = refused(vit.main, *where, *options)
        assert last.startswith(f"vit: error: expected a checkpoint of this model, got {path} ("), last

    path.write_bytes(content[:-100])
    is_refused("--convert", path, "--overwrite")
    torch.save({**held, "hyper_parameters": {**held["hyper_parameters"], "model": {"width": 32}}}, path)
    is_refused("--convert", path, "--overwrite")
    assert path.exists()  # --overwrite removes nothing before an error
    path.write_bytes(content)
    (folder / "train" / "third").mkdir()
    is_refused("--resume")  # three classes
    last = refused(vit.main, *TINY, "--convert", path, "--out", folder / "digits")
    assert last == "vit: error: images must be (n, *(3, 32, 32)), got (256, 1, 8, 8)"


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
def test_demo(tmp_path, no_pictures, monkeypatch, capsys):
    train, test, *rest = vit_data.digits(tmp_path)
    fewer = vit_data.ImageSet(train.cut(320)[0], test.cut(64)[0], *rest)
    monkeypatch.setitem(vit_data.READERS, "digits", lambda _: fewer)
    monkeypatch.setattr(mil, "draw_digits", lambda bags: Figure())
    demo.main(["--quick", "--seeds", "1", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "largest change of a logit by conversion" in shown
    assert shown.count(".png") >= 5
    assert (tmp_path / "bags" / "lookup-0" / "roc.png").exists()


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
def test_training_benchmark(folder, capsys):
    small = ["--data", "folder", "--data-dir", str(folder), "--model", "tiny", "--batch", "4", "--device", "cpu"]

    def run(options, *more, output="images.csv"):
        images.main([*options.split(), *more, "--output", str(folder / output)])
        return capsys.readouterr().out

    run("paper --epochs 1 --seeds 1 --attentions dot --lr 3e-3 1e-3", *small, output="rates.csv")
    rates = [row["settings"].rpartition(", lr ")[2] for row in read(folder / "rates.csv")]
    assert rates == ["0.003", "0.001"]
    assert "would not end" in run("working --epochs 8 --seeds 1 --minutes 0", *small)
    assert not (folder / "images.csv").exists()
    run("working --epochs 3 --seeds 1 --attentions dot adaptive", *small)
    rows = read(folder / "images.csv")
    clean = {row["attention"]: float(row["value"]) for row in rows if row["measure"] == "accuracy"}
    assert clean == {"dot": 1.0, "adaptive": 1.0}
    assert (folder / "images.png").exists()  # beside the rows
    shown = run("report", "--picture", str(folder / "drawn.svg"))
    assert "fraction of masked patches" in (folder / "drawn.svg").read_text()
    assert "| none | **1.0000** | **1.0000** | +0.0000 |" in shown


@pytest.mark.parametrize(("options", "message"), [
    ("--graphs", "--graphs captures CUDA graphs: expected --device cuda, got cpu"),
    ("--attentions dot adaptiv", "attention must be one of adaptive, eager, kernel, sparse, dot"),
    ("--attentions adaptive:typo", "options of adaptive must be among lr, last, init, debias, shared, blocks"),
    ("--attentions adaptive:blocks=0", "blocks must be a positive integer"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused_at_once(options, message, capsys):
    with pytest.raises(SystemExit):
        images.parse(["throughput", "--device", "cpu", *options.split()])
    assert message in capsys.readouterr().err


def test_damaged_images_are_as_strong_as_they_say():
    pixels, generator = torch.full((50, 3, 32, 32), 0.5), torch.Generator().manual_seed(0)
    noisy, masked, biased = (damage(pixels, 0.25, generator) - 0.5 for damage in images_training.DAMAGES)
    assert noisy.std() == pytest.approx(0.25, rel=0.01)
    patches = (masked != 0).float().unfold(2, 4, 4).unfold(3, 4, 4).mean((1, 4, 5))
    assert set(patches.unique().tolist()) == {0, 1}  # a patch goes as a whole, in all channels
    assert patches.mean() == pytest.approx(0.25, abs=0.02)
    assert biased[:, :, 0, 0].unique(dim=0).tolist() == [[0.25, -0.25, 0.25]]


@pytest.mark.parametrize(("attention", "check"), [
    ("adaptive:last=1,lr=0.1", lambda similarity: similarity.w.shape == (2, 2, 32)),
    ("adaptive:blocks=4,lr=0.1", lambda similarity: similarity.w.shape == (2, 2, 4)),
    ("adaptive:debias,init=dis,shared,lr=0.1", lambda it: it.num_heads is None and it.init == "dis"),
    ("eager:debias,lr=0.1", lambda similarity: isinstance(similarity, ReferenceSimilarity)),
])  # fmt: skip
def test_changes_of_an_attention(attention, check):
    data = vit_data.load("digits", Path())
    setup = images_training.Setup("tiny", 1, 8, ("dot",))
    model, factor = images_training.build(attention, setup, data, vit_batches.channel_scale(data.train.images))
    assert factor == 0.1
    layers = [layer for layer in model.modules() if isinstance(layer, ah.AdaptiveAttention)]
    assert len(layers) == (1 if "last=1" in attention else 2)
    assert all(check(layer.similarity) for layer in layers)
    assert all(layer.similarity.bias is not None for layer in layers if "debias" in attention)
    optimizer = images_training.make_optimizer(model, 1.0, 0.05, factor)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.1]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
