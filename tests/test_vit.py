"""The vision transformer example and the image benchmark: data sets, attentions, conversion, pictures."""

import gzip
import io
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
    figure = vit.draw_maps(model, images, torch.tensor([0, 0]), torch.tensor([0, 1]), ["cat", "dog", "cow"])
    *axes, _ = figure.axes
    assert [axis.get_title() for axis in axes[:2]] == [
        "true cat\npredicted cat \u2713",
        "true cat\npredicted dog \u2717",
    ]
    for place, weights in enumerate([*after, before], 1):
        for column in range(2):
            shown = axes[2 * place + column].images[-1].get_array()
            np.testing.assert_allclose(shown.flatten(), weights[column].mean(0)[0, 1:], rtol=1e-4)


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


def test_a_pickle_with_code_is_refused(tmp_path):
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(os.getcwd))
    with pytest.raises(pickle.UnpicklingError, match=r"got posix\.getcwd"):
        vit_data.load_plain(path)


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
    model, factor = images_training.build(attention, setup, data, image_model.channel_scale(data.train.images))
    assert factor == 0.1
    layers = [layer for layer in model.modules() if isinstance(layer, ah.AdaptiveAttention)]
    assert len(layers) == (1 if "last=1" in attention else 2)
    assert all(check(layer.similarity) for layer in layers)
    assert all(layer.similarity.bias is not None for layer in layers if "debias" in attention)
    optimizer = images_training.make_optimizer(model, 1.0, 0.05, factor)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.1]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
