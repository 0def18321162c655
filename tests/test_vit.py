"""The vision transformer example: every data set, every attention, many processes, interruptions, pictures."""

import errno
import gzip
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ahop_layers as ah
from benchmarks.harness.rows import RESULTS, read
from benchmarks.paper.images import __main__ as images
from benchmarks.paper.images import training as images_training
from benchmarks.paper.images.attentions import Attention
from benchmarks.paper.retrieval.systems import ReferenceSimilarity
from examples import demo, vit
from examples.common import checkpoints
from examples.vision import batches as vit_batches
from examples.vision import data as vit_data
from examples.vision import model as vit_model
from examples.vision import pictures as vit_pictures

ROOT = Path(__file__).parents[1]
TINY = ["--model", "tiny", "--accelerator", "cpu"]
FAST = [*TINY, "--fast-dev-run", "--batch-size", "16"]

pytestmark = pytest.mark.slow


def data_dir(name):
    """The folder that AHOP_DATA_DIR names, if it holds a data set."""
    where = Path(os.environ.get("AHOP_DATA_DIR", ROOT / "data"))
    try:
        vit_data.find([where / name], ["labels.npz" if name == "cifar10" else vit_data.MNIST_FILES[0]])
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    return where


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
def made(tmp_path, request):
    """A data set of random pixels in the published file layout."""
    rng = np.random.default_rng(0)
    if request.param == "mnist":
        home = tmp_path / "MNIST" / "raw"
        home.mkdir(parents=True)
        for name in vit_data.MNIST_FILES:
            shape = (8, 28, 28) if "images" in name else (8,)
            data = rng.integers(0, 10, shape).astype(np.uint8)
            head = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">i4").tobytes()
            (home / name).write_bytes(gzip.compress(head + data.tobytes()))
    elif request.param == "tiny-imagenet":
        home = tmp_path / "tiny-imagenet-200"
        (home / "val" / "images").mkdir(parents=True)
        (home / "wnids.txt").write_text("n2\nn1\n")
        for name in ("n1", "n2"):
            (home / "train" / name / "images").mkdir(parents=True)
            for number in range(6):
                Image.new("RGB", (64, 64)).save(home / "train" / name / "images" / f"{number}.JPEG")
        Image.new("L", (64, 64)).save(home / "val" / "images" / "v.JPEG")
        (home / "val" / "val_annotations.txt").write_text("v.JPEG\tn2\t0\t0\t9\t9\n")
    else:
        key, home, parts, meta = {
            "cifar10": (
                b"labels",
                "cifar-10-batches-py",
                [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"],
                10,
            ),
            "cifar100": (b"fine_labels", "cifar-100-python", ["train", "test"], 100),
        }[request.param]
        (tmp_path / home).mkdir()
        for part in parts:
            batch = {b"data": rng.integers(0, 256, (8, 3072)).astype(np.uint8), key: list(range(8))}
            (tmp_path / home / part).write_bytes(pickle.dumps(batch, protocol=2))
        names = {key[:-1] + b"_names": [f"c{n}".encode() for n in range(meta)]}
        (tmp_path / home / ("batches.meta" if meta == 10 else "meta")).write_bytes(pickle.dumps(names, protocol=2))
    return request.param, tmp_path


def test_digits_with_every_attention(tmp_path):
    for attention in vit_model.ATTENTIONS:
        out = tmp_path / attention
        vit.main([*FAST, "--attention", attention, "--out", str(out)])
        written = {path.name for path in out.iterdir()}
        maps, weights = {"maps.png"} & written, {"weights.png"} & written
        assert {"confusion.png", "results.json"} <= written
        assert bool(maps) == (attention != "dot")
        assert bool(weights) == (attention == "adaptive")


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_data_sets_that_are_present(name, tmp_path, monkeypatch):
    where, seen = data_dir(name), []
    monkeypatch.setattr(vit, "load", lambda *arguments: seen.append(vit_data.load(*arguments)) or seen[0])
    vit.main([*FAST, "--data", name, "--data-dir", str(where), "--out", str(tmp_path)])
    train, test = seen[0].train, seen[0].test
    assert len(test.labels) == 10_000
    assert len(train.images) == {"mnist": 60_000, "cifar10": 50_000}[name]
    assert train.labels.bincount().min() >= 5000
    assert train.images[:1000].float().std() > 60


@pytest.mark.parametrize("made", ["mnist", "cifar10", "cifar100", "tiny-imagenet"], indirect=True)
def test_data_sets_in_their_published_layout(made):
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


def on_folder(folder, out, *more):
    """Arguments of a short training on a folder of images: 22 training images, five steps per epoch."""
    where = ["--data", "folder", "--data-dir", str(folder), "--batch-size", "4", "--out", str(folder / out)]
    return [*TINY, *where, "--lr", "0.003", "--epochs", "2", *more]


def test_a_folder_of_images(folder):
    assert vit.main(on_folder(folder, "out", "--augment"))["test_accuracy"] == 1.0


def test_missing_data_is_named(tmp_path, refused):
    out = ["--out", tmp_path / "out"]
    for name, expected in (("cifar10", "labels.npz"), ("mnist", "train-images"), ("folder", "train, test")):
        last = refused(vit.main, *TINY, "--data", name, "--data-dir", tmp_path / "nowhere", *out)
        assert last.startswith(f"vit: error: {name}: expected the data in ")
        assert expected in last
        assert last.endswith("; see --data-dir" + ", or use --download" * (name != "folder"))  # which has no source
        with pytest.raises(FileNotFoundError, match=r"see --data-dir$"):  # for benchmarks, which download nothing
            vit_data.load(name, tmp_path / "nowhere")
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "test").mkdir()
    last = refused(vit.main, *TINY, "--data", "folder", "--data-dir", tmp_path, *out)
    assert last.startswith("vit: error: folder: expected images (.png ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("made", ["mnist", "cifar10", "cifar100", "tiny-imagenet"], indirect=True)
def test_damaged_data_is_named(made, refused):
    name, where = made
    files = [path for path in sorted(where.rglob("*")) if path.is_file()]
    for path in (files[0], files[-1]):
        content = path.read_bytes()
        for damage in (content[: len(content) // 2], b"\xff\xfe\xfa" * 9):
            if path.suffix == ".txt" and damage in content:  # half of a text is still a text
                continue
            path.write_bytes(damage)
            last = refused(vit.main, *TINY, "--data", name, "--data-dir", where, "--out", where / "out")
            assert "expected files as published" in last or "expected an image" in last, last
        path.write_bytes(content)
    vit_data.load(name, where)


def test_too_few_images_are_named(folder, refused):
    for path in sorted((folder / "train").rglob("*.png"))[1:]:
        path.unlink()
    last = refused(vit.main, *on_folder(folder, "out"))
    assert last == "vit: error: expected at least 2 training images and 1 test image, got 1 and 8"


def test_a_failed_download_is_named(tmp_path, monkeypatch, refused):
    monkeypatch.setitem(vit_data.SOURCES, "cifar100", [(tmp_path / "nothing.tar.gz").as_uri()])
    where = ["--data", "cifar100", "--data-dir", tmp_path / "data", "--download", "--out", tmp_path / "out"]
    last = refused(vit.main, *TINY, *where)
    assert last.startswith(f"vit: error: file://{tmp_path}/nothing.tar.gz: expected a file to download, got ")
    assert not list((tmp_path / "data").iterdir())


def test_a_pickle_with_code_is_refused(tmp_path):
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(os.getcwd))
    with pytest.raises(pickle.UnpicklingError, match=r"got posix\.getcwd"):
        vit_data.load_plain(path)


@pytest.mark.parametrize("made", ["cifar100"], indirect=True)
def test_download_unpacks_archives(made, tmp_path, monkeypatch):
    name, where = made
    archive = tmp_path / "cifar-100-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(where / "cifar-100-python", "cifar-100-python")
    monkeypatch.setitem(vit_data.SOURCES, name, [archive.as_uri()])
    target = tmp_path / "fresh"
    data = vit_data.load(name, target, download=True)
    assert torch.equal(data.test.images, vit_data.load(name, where).test.images)
    assert [path.name for path in target.iterdir()] == ["cifar-100-python"]


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
    with pytest.raises(ah.AHopError, match="a multiple of the 3 processes, got 8"):
        labels(0, 0, 3)


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


KILLED_AT_STEP_8 = """
import os, sys
from examples import vit

class Killer(vit.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 8:
            os.kill(os.getpid(), 9)

vit.main(sys.argv[1:], [Killer()])
"""


def test_a_killed_run_resumes_at_its_last_checkpoint(folder):
    # Killed in the second epoch, after its third step and one step after a checkpoint.
    options = ("--augment", "--save-every", "7")
    command = [sys.executable, "-c", KILLED_AT_STEP_8, *on_folder(folder, "killed", *options)]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (folder / "killed" / "results.json").exists()
    assert torch.load(folder / "killed" / "last.ckpt", weights_only=True)["global_step"] == 7
    resumed = vit.main(on_folder(folder, "killed", *options, "--resume"))  # without --overwrite: its own folder
    whole = vit.main(on_folder(folder, "whole", *options))
    assert resumed == whole
    found, expected = (weights(folder / name / "best.ckpt") for name in ("killed", "whole"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not list(folder.rglob("*.part"))


def test_resuming_nothing_is_an_error(tmp_path, refused):
    last = refused(vit.main, "--out", tmp_path, "--resume")
    assert last == f"vit: error: expected a checkpoint, got {tmp_path / 'last.ckpt'}, which does not exist"


def test_a_damaged_checkpoint_is_named(tmp_path, refused):
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": {"weight": torch.rand(100)}, "hyper_parameters": {}}, path)
    checkpoints.check_checkpoint(path)
    damaged = {
        ", which cannot be read (": [path.read_bytes()[:-100], np.random.default_rng(0).bytes(1000), b""],
        " without state_dict": [saved({"weight": torch.rand(3)}), saved(torch.rand(3))],
    }
    for reason, contents in damaged.items():
        for content in contents:
            path.write_bytes(content)
            for option in (["--resume"], ["--resume", path], ["--convert", path, "--overwrite"]):
                last = refused(vit.main, *TINY, "--out", tmp_path, *option)
                assert last.startswith(f"vit: error: expected a checkpoint, got {path}{reason}")
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]  # --overwrite removed nothing before the error


def test_a_checkpoint_that_does_not_fit_is_named(folder, refused):
    vit.main(on_folder(folder, "run", "--attention", "dot", "--save-every", "5"))
    path = folder / "run" / "last.ckpt"
    content, where = path.read_bytes(), on_folder(folder, "run")

    def change(spoil):
        held = torch.load(io.BytesIO(content), weights_only=True)
        spoil(held)
        path.write_bytes(saved(held))

    spoiled = [
        lambda held: held["hyper_parameters"]["model"].update(width=32),
        lambda held: held["hyper_parameters"].pop("attention"),
        lambda held: held["state_dict"].pop("model.head.bias"),
        lambda held: held.update(state_dict=5),
    ]
    for spoil in spoiled:
        change(spoil)
        for option in (["--resume"], ["--convert", path, "--overwrite"]):
            last = refused(vit.main, *where, *option)
            assert last.startswith(f"vit: error: expected a checkpoint of this model, got {path}, which does not fit: ")
    spoiled = [
        lambda held: held["optimizer_states"][0]["param_groups"].clear(),
        lambda held: held.update(loops={"fit_loop": 5}),
    ]
    for spoil in spoiled:  # only the state of the training does not fit
        change(spoil)
        last = refused(vit.main, *where, "--resume")
        assert last.startswith(f"vit: error: expected a checkpoint of this model, got {path}, which does not fit: ")
    change(lambda held: held["optimizer_states"].clear())
    last = refused(vit.main, *where, "--resume")
    assert last == f"vit: error: expected a checkpoint, got {path} without optimizer_states"
    path.write_bytes(content)
    (folder / "train" / "third").mkdir()
    last = refused(vit.main, *where, "--resume")
    reason = "images (3, 32, 32) of 3 classes, got one for images (3, 32, 32) of 2 classes"
    assert last == f"vit: error: expected a checkpoint for {reason}"
    (folder / "train" / "third").rmdir()
    last = refused(vit.main, *TINY, "--convert", path, "--out", folder / "digits")
    assert last == "vit: error: images must be (n, *(3, 32, 32)), got (256, 1, 8, 8)"


def saved(held):
    """Returns the bytes of a file that torch.save would write."""
    buffer = io.BytesIO()
    torch.save(held, buffer)
    return buffer.getvalue()


def test_a_bad_argument_gets_one_line(tmp_path, refused):
    last = refused(vit.main, *TINY, "--patch", 3, "--out", tmp_path / "out")
    assert last == "vit: error: patch must divide the image, got patch 3 and image 8 x 8"
    assert not (tmp_path / "out").exists()


def test_maps_show_predictions_and_the_dot_product():
    model = vit_model.VisionTransformer((1, 4, 4), classes=3, patch=2, depth=2, width=8, heads=2).eval()
    vit_model.use_attention(model, "adaptive", blocks=2)
    images = torch.rand(2, 1, 4, 4)
    before = list(ah.association_maps(model, images).values())[-1]
    for part in ah.similarity_parameters(model):
        torch.nn.init.normal_(part)
    after = ah.association_maps(model, images).values()
    *axes, bar = vit_pictures.maps(model, images, [("cat", "cat"), ("cat", "dog")]).axes
    assert [axis.get_title() for axis in axes[:2]] == [
        "true cat\npredicted cat \u2713",
        "true cat\npredicted dog \u2717",
    ]
    assert [axis.get_ylabel() for axis in axes[::2]] == ["image", "block 1", "block 2", "block 2,\ndot product"]
    for place, weights in enumerate([*after, before], 1):
        for column in range(2):
            shown = axes[2 * place + column].images[-1].get_array()
            np.testing.assert_allclose(shown.flatten(), weights[column].mean(0)[0, 1:], rtol=1e-4)
    assert bar.get_ylabel() == "attention weight"


def test_the_result_is_shown_even_if_no_picture_can_be_written(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(vit, "draw_pictures", fail)
    with pytest.raises(SystemExit) as stopped:
        vit.main([*FAST, "--out", str(tmp_path)])
    shown = capsys.readouterr()
    assert stopped.value.code == 2
    assert shown.err.endswith("vit: error: [Errno 28] No space left on device\n")
    assert "digits, adaptive: test accuracy 0." in shown.out
    assert "test_accuracy" in json.loads((tmp_path / "results.json").read_text())


def test_the_confusion_matrix_shows_predicted_classes_and_accuracy():
    axis = vit_pictures.confusion(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 1, 1, 0]), ["no", "yes"]).axes[0]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("predicted class", "true class")
    assert axis.get_title() == "accuracy 75.0%"
    counts = {text.get_position(): text.get_text() for text in axis.texts}
    assert counts == {(0, 0): "1", (0, 1): "1", (1, 1): "2"}


def test_conversion_keeps_the_logits(folder):
    vit.main(on_folder(folder, "dot", "--attention", "dot"))
    checkpoint, images = folder / "dot" / "best.ckpt", torch.rand(32, 3, 32, 32)
    classifier, change = vit.convert(checkpoint, "adaptive", images, lr=0.5)
    assert classifier.training
    assert change < 1e-5 < classifier.model(images).std()
    assert classifier.hparams.lr == 0.5
    assert ah.similarity_parameters(classifier)
    _, sparse = vit.convert(checkpoint, "sparse", images)
    assert sparse > 1e-4  # another separation changes the logits
    tuned = vit.main(on_folder(folder, "tuned", "--convert", str(checkpoint)))
    assert tuned["logit_change"] < 1e-5
    with pytest.raises(ah.AHopError, match="dot-product attention, got 'adaptive'"):
        vit.convert(folder / "tuned" / "best.ckpt", "adaptive", images)
    for blocks, count in ((8, 8), (None, 32)):
        classifier, change = vit.convert(checkpoint, "adaptive", images, blocks=blocks)
        assert change < 1e-5
        assert {w.shape[-1] for name, w in classifier.named_parameters() if name.endswith("similarity.w")} == {count}
    restored = vit.restore(folder / "tuned" / "best.ckpt")  # 4 blocks by default
    assert {w.shape[-1] for name, w in restored.named_parameters() if name.endswith("similarity.w")} == {4}


def test_a_number_of_blocks_that_does_not_divide_a_head_is_refused(tmp_path, refused):
    last = refused(vit.main, *TINY, "--blocks", 3, "--out", tmp_path / "out")
    assert last.startswith("vit: error: blocks.layers.0.self_attn: ")
    assert not (tmp_path / "out").exists()


def test_a_model_names_the_images_it_takes():
    model = vit_model.VisionTransformer((1, 8, 8), 10, 2, **vit_model.MODELS["tiny"])
    with pytest.raises(ah.AHopError, match=r"images must be \(n, \*\(1, 8, 8\)\), got \(2, 3, 8, 8\)"):
        model(torch.rand(2, 3, 8, 8))
    for patch in (3, -2):
        with pytest.raises(ah.AHopError, match=f"patch must divide the image, got patch {patch} and image 8 x 8"):
            vit_model.VisionTransformer((1, 8, 8), 10, patch, **vit_model.MODELS["tiny"])


def test_kernels_learn_from_the_separation_loss_alone():
    kernel = vit_model.KernelSimilarity(6, num_heads=2)
    query, key = torch.randn(3, 2, 5, 6), torch.randn(3, 2, 4, 6, requires_grad=True)
    scores = kernel(query, key)
    torch.testing.assert_close(scores, query @ key.mT)  # the identity at the start
    task = torch.autograd.grad(scores.square().sum(), [key, kernel.phi], retain_graph=True, allow_unused=True)
    apart = torch.autograd.grad(kernel.separation_loss, [key, kernel.phi], allow_unused=True)
    assert [grad is None for grad in (*task, *apart)] == [False, True, True, False]
    unit = torch.nn.functional.normalize(key.detach(), dim=-1).flatten(0, 1)
    pairs = torch.stack([torch.pdist(head) for head in unit])
    torch.testing.assert_close(kernel.separation_loss, (-2 * pairs.square()).exp().mean(-1).log().mean())


def test_demo(tmp_path, monkeypatch, capsys):
    train, test, *rest = vit_data.digits(tmp_path)
    fewer = vit_data.ImageSet(train.cut(320)[0], test.cut(64)[0], *rest)
    monkeypatch.setitem(vit_data.READERS, "digits", lambda _: fewer)
    demo.main(["--quick", "--seeds", "1", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "largest change of a logit by conversion" in shown
    assert shown.count(".png") >= 6
    assert (tmp_path / "vit" / "adaptive-tuned-0" / "weights.png").exists()


def test_throughput_benchmark(tmp_path, capsys):
    output = tmp_path / "images.csv"
    small = ["--data", "digits", "--model", "tiny", "--batch", "4", "--seconds", "0.01", "--device", "cpu"]
    images.main(["throughput", *small, "--output", str(output)])
    rows = read(output)
    assert {row["attention"] for row in rows} == {*vit_model.ATTENTIONS, "eager"}
    assert all(float(row["value"]) > 0 and row["torch"] and row["device"] for row in rows)
    capsys.readouterr()
    images.main(["throughput", *small, "--output", str(output)])
    assert "seed" not in capsys.readouterr().out  # nothing is measured twice
    assert len(read(output)) == len(rows)


def test_training_benchmark(folder, capsys):
    output, picture = folder / "images.csv", folder / "images.png"
    small = ["--data", "folder", "--data-dir", str(folder), "--model", "tiny", "--batch", "4", "--device", "cpu"]
    paths = ["--output", str(output)]  # the picture is drawn beside it
    images.main(["working", *small, "--epochs", "8", "--seeds", "1", "--minutes", "0", *paths])
    assert "would not end" in capsys.readouterr().out
    assert not output.exists()
    images.main(["working", *small, "--epochs", "3", "--seeds", "1", "--attentions", "dot", "adaptive", *paths])
    rows = read(output)
    clean = {row["attention"]: float(row["value"]) for row in rows if row["measure"] == "accuracy"}
    assert clean == {"dot": 1.0, "adaptive": 1.0}
    assert picture.exists()
    images.main(["report", *paths, "--picture", str(folder / "drawn.svg")])
    assert "fraction of masked patches" in (folder / "drawn.svg").read_text()
    shown = capsys.readouterr().out
    assert "| corruption | dot (1 seed) | adaptive (1 seed) | adaptive minus dot |" in shown
    assert "| none | **1.0000** | **1.0000** | +0.0000 |" in shown


def test_every_rate_is_measured_and_shown(folder, capsys):
    output = folder / "images.csv"
    small = ["--data", "folder", "--data-dir", str(folder), "--model", "tiny", "--batch", "4", "--device", "cpu"]
    rest = ["--epochs", "1", "--seeds", "1", "--attentions", "dot", "--lr", "3e-3", "1e-3", "--output", str(output)]
    images.main(["paper", *small, *rest])
    rates = [row["settings"].rpartition(", lr ")[2] for row in read(output) if row["measure"] == "accuracy"]
    assert rates == ["0.003", "0.001"]
    assert "| attention | lr 0.001 | lr 0.003 | best minus" in capsys.readouterr().out


def test_missing_images_are_named(tmp_path):
    with pytest.raises(SystemExit, match=r"cifar-10-batches-py[\s\S]*docs/data\.md"):
        images.main(["paper", "--data-dir", str(tmp_path), "--device", "cpu", "--output", str(tmp_path / "rows.csv")])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--graphs"], "--graphs captures CUDA graphs: expected --device cuda, got cpu"),
        (["--attentions", "dot", "adaptiv"], "attention must be one of adaptive, eager, kernel, sparse, dot"),
        (["--attentions", "dot:debias"], "options of dot must be among none"),
        (["--attentions", "adaptive:typo"], "options of adaptive must be among lr, last, init, debias, shared, blocks"),
        (["--attentions", "adaptive:lr=1,lr=2"], "each at most once, got 'adaptive:lr=1,lr=2'"),
        (["--attentions", "adaptive:"], "got 'adaptive:'"),
        (["--attentions", "kernel:shared"], "options of kernel must be among last"),
        (["--attentions", "sparse:shared"], "options of sparse must be among last"),
        (["--attentions", "adaptive:debias=False"], "debias must have no value"),
        (["--attentions", "adaptive:init=dist"], "init must be one of dot, dis, l1, uniform"),
        (["--attentions", "adaptive:last=all"], "last must be a positive integer"),
        (["--attentions", "adaptive:blocks=0"], "blocks must be a positive integer"),
        (["--attentions", "eager:blocks=4"], "options of eager must be among lr, last, init, debias, shared, each"),
        (["--attentions", "adaptive:lr"], "lr must be a positive number"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(options, message, capsys):
    with pytest.raises(SystemExit):
        images.parse(["throughput", "--device", "cpu", *options])
    assert message in capsys.readouterr().err


def test_every_attention_of_the_rows_is_read():
    attentions = {row["attention"] for row in read(RESULTS / "images.csv")}
    assert len(attentions) > 5
    assert {Attention.read(text).name for text in attentions} == {*vit_model.ATTENTIONS, "eager"}
    assert Attention.read("adaptive:lr=0.1,last=1,init=dis") == Attention("adaptive", lr=0.1, last=1, init="dis")


def test_corruptions_are_as_strong_as_they_say():
    pixels, generator = torch.full((50, 3, 32, 32), 0.5), torch.Generator().manual_seed(0)
    noisy, masked, biased = (corrupt(pixels, 0.25, generator) - 0.5 for corrupt in images_training.CORRUPTIONS)
    assert noisy.std() == pytest.approx(0.25, rel=0.01)
    patches = (masked != 0).float().unfold(2, 4, 4).unfold(3, 4, 4).mean((1, 4, 5))
    assert set(patches.unique().tolist()) == {0, 1}  # a patch goes as a whole, in all channels
    assert patches.mean() == pytest.approx(0.25, abs=0.02)
    assert biased[:, :, 0, 0].unique(dim=0).tolist() == [[0.25, -0.25, 0.25]]


@pytest.mark.parametrize(
    ("attention", "check"),
    [
        ("adaptive:debias", lambda layers: all(layer.similarity.bias is not None for layer in layers)),
        ("adaptive:init=dis", lambda layers: all(layer.similarity.init == "dis" for layer in layers)),
        ("adaptive:last=1", lambda layers: len(layers) == 1),
        ("adaptive:blocks=4", lambda layers: all(layer.similarity.w.shape == (2, 2, 4) for layer in layers)),
        ("adaptive:blocks=4,shared", lambda layers: all(layer.similarity.w.shape == (2, 4) for layer in layers)),
        ("adaptive:shared", lambda layers: all(layer.similarity.num_heads is None for layer in layers)),
        (
            "adaptive:debias,init=dis,shared",
            lambda layers: all(
                (part.num_heads, part.init, part.bias.shape) == (None, "dis", (part.dim,))
                for part in (layer.similarity for layer in layers)
            ),
        ),
        (
            "eager:debias",
            lambda layers: all(
                isinstance(layer.similarity, ReferenceSimilarity) and layer.similarity.bias is not None
                for layer in layers
            ),
        ),
    ],
)
def test_changes_of_an_attention(attention, check):
    data = vit_data.load("digits", Path())
    setup = images_training.Setup("tiny", 1, 8, ("dot",))
    scale = vit_batches.channel_scale(data.train.images)
    model, factor = images_training.build(f"{attention}{',' if ':' in attention else ':'}lr=0.1", setup, data, scale)
    assert factor == 0.1
    assert check([layer for layer in model.modules() if isinstance(layer, ah.AdaptiveAttention)])
    optimizer = vit_model.make_optimizer(model, 1.0, 0.05, factor)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.1]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
