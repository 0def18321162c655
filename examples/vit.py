"""Train a vision transformer with dot-product and with adaptive attention, or convert a trained one and fine-tune it.

To run: python -m examples.vit                                       (digits, both attentions, no download)
        python -m examples.vit --attention adaptive --blocks 0       (sorts all dimensions: the paper's footprints)
        python -m examples.vit --convert out/vit/dot/best.ckpt       (outputs are unchanged before fine-tuning)
        python -m examples.vit --data-dir IMAGES --model small --precision bf16-mixed

All attentions start from the same weights and see the same batches. IMAGES holds train/<class>/ and test/<class>/ with
image files, which are resized to 32 x 32. A GPU is used if there is one.

Prints a table of the attentions. Writes checkpoints, a log, the confusion matrix and, for adaptive attention, maps of
the attention of the class token and the change of the similarity weights into OUT/ATTENTION. --resume continues a run.
"""

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from einops import rearrange, repeat
from lightning.pytorch import callbacks, loggers
from matplotlib.figure import Figure
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import ConfusionMatrixDisplay
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import ahop_layers as ah

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # not the hardware found, and tips
MODELS = {"tiny": (2, 64, 2), "small": (6, 192, 3)}  # depth, width, heads: for a laptop, for a GPU
FILES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
Batch = tuple[Tensor, Tensor]  # images (n, channels, height, width) with values from 0 to 1, labels (n,)


class ImageSet(NamedTuple):
    """Training and test images, the names of their classes, and the side of a patch in pixels."""

    train: Batch
    test: Batch
    classes: list[str]
    patch: int


def load_images(folder: Path | None) -> ImageSet:
    """Reads a folder of images, or the 8 x 8 digits of scikit-learn; their test set is by other writers."""
    if folder is None:
        data = load_digits()
        images, labels = torch.tensor(data.images / 16, dtype=torch.float32)[:, None], torch.tensor(data.target)
        count = len(images) * 4 // 5
        return ImageSet((images[:count], labels[:count]), (images[count:], labels[count:]), [*"0123456789"], 2)
    classes = sorted(path.name for path in (folder / "train").glob("*") if path.is_dir())
    return ImageSet(read_folder(folder / "train", classes), read_folder(folder / "test", classes), classes, 4)


def read_folder(folder: Path, classes: Sequence[str]) -> Batch:
    """Reads the images in ``folder/<class>/``, resized to 32 x 32."""
    found = [(path, label) for label, name in enumerate(classes) for path in sorted((folder / name).rglob("*"))]
    files = [(path, label) for path, label in found if path.suffix.lower() in FILES]
    if not files:
        raise ah.AHopError(f"expected images ({' '.join(FILES)}) in {folder}/<class>, got none")
    pixels = np.stack([np.asarray(Image.open(path).convert("RGB").resize((32, 32))) for path, _ in files])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    return images, torch.tensor([label for _, label in files])


class VisionTransformer(nn.Module):
    """A vision transformer of torch's own layers that classifies an image by its class token."""

    def __init__(self, channels: int, side: int, classes: int, patch: int, size: tuple[int, int, int]) -> None:
        super().__init__()
        if side % patch:
            raise ah.AHopError(f"patch must divide the side of an image, got patch {patch} and side {side}")
        self.patch, self.grid, (depth, width, heads) = patch, side // patch, size
        self.embed = nn.Linear(channels * patch**2, width)
        # Of the same scale as embedded patches: with the usual 0.02, small models learn positions slowly.
        self.class_token = nn.Parameter(0.2 * torch.randn(width))
        self.position = nn.Parameter(0.2 * torch.randn(1 + self.grid**2, width))
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, heads, 4 * width, **options) for _ in range(depth))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Computes ``logits (n, classes)`` from ``images (n, channels, side, side)`` with values from 0 to 1."""
        cut = rearrange(2 * images - 1, "n c (h p) (w q) -> n (h w) (c p q)", p=self.patch, q=self.patch)
        token = repeat(self.class_token, "d -> n 1 d", n=len(images))
        tokens = torch.cat((token, self.embed(cut)), 1) + self.position
        return self.head(self.norm(self.layers(tokens)[:, 0]))


class Classifier(L.LightningModule):
    """Trains a vision transformer. Its checkpoints hold all arguments, so that they restore the model."""

    def __init__(self, model: dict[str, Any], attention: str, blocks: int | None, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = VisionTransformer(**model)
        if attention == "adaptive":
            ah.adapt_(self.model, blocks=blocks)

    def training_step(self, batch: Batch, number: int) -> Tensor:
        """Returns the loss of a batch."""
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, number: int) -> None:
        """Logs loss and accuracy."""
        logits, part = self.model(batch[0]), "test" if self.trainer.testing else "val"
        measures = {"loss": cross_entropy(logits, batch[1]), "accuracy": (logits.argmax(-1) == batch[1]).float().mean()}
        self.log_dict({f"{part}_{name}": value for name, value in measures.items()}, prog_bar=True)

    test_step = validation_step

    def configure_optimizers(self) -> dict[str, Any]:
        """Returns AdamW, without weight decay of the similarities, with linear warm-up and cosine decay."""
        optimizer = torch.optim.AdamW(ah.parameter_groups(self.model, self.hparams.lr, weight_decay=0.05))
        steps = self.trainer.estimated_stepping_batches
        options = {"total_steps": steps, "pct_start": 0.05, "cycle_momentum": False}
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, **options)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@torch.no_grad()
def convert(
    checkpoint: Path, attention: str, blocks: int | None, lr: float, images: Tensor
) -> tuple[Classifier, float]:
    """Restores a dot-product classifier and replaces its attention.

    Returns the classifier in training mode, and the largest absolute change of a logit of the images.
    """
    try:
        classifier = Classifier.load_from_checkpoint(checkpoint, map_location="cpu", blocks=blocks, lr=lr).eval()
        before = classifier.model(images)
    except Exception as error:  # a damaged file, another model or other images
        raise ah.AHopError(f"expected a checkpoint of this model, got {checkpoint} ({error})") from None
    if classifier.hparams.attention != "dot":
        raise ah.AHopError(f"expected a checkpoint with dot-product attention, got {classifier.hparams.attention!r}")
    if attention == "adaptive":
        ah.adapt_(classifier.model, blocks=blocks)
    classifier.hparams.attention = attention
    change = float((classifier.model(images) - before).abs().max())
    return classifier.train(), change


def run(options: argparse.Namespace, data: ImageSet, attention: str) -> dict[str, Any]:
    """Trains a new or a converted classifier, draws pictures, and returns the test results of the best epoch."""
    L.seed_everything(options.seed, verbose=False)
    learning, change = {"blocks": options.blocks or None, "lr": options.lr}, 0.0
    if options.convert:
        classifier, change = convert(options.convert, attention, **learning, images=data.test[0][:256])
    else:
        (_, channels, side, _), patch = data.train[0].shape, options.patch or data.patch
        model = {"channels": channels, "side": side, "classes": len(data.classes), "patch": patch}
        classifier = Classifier({**model, "size": MODELS[options.model]}, attention, **learning)
    order = torch.randperm(len(data.train[1]))
    held, train = (
        TensorDataset(*(part[rows] for part in data.train)) for rows in order.tensor_split([len(order) // 10])
    )
    loader = partial(DataLoader, batch_size=options.batch_size)
    folder = options.out / attention
    best = callbacks.ModelCheckpoint(folder, "best", monitor="val_accuracy", mode="max", save_last=True)
    stop = callbacks.EarlyStopping("val_accuracy", mode="max", patience=10)
    trainer = L.Trainer(
        devices=1, max_epochs=options.epochs, precision=options.precision, fast_dev_run=options.fast_dev_run,
        logger=loggers.CSVLogger(folder, "log"), log_every_n_steps=1, callbacks=[best, stop],
        enable_progress_bar=sys.stderr.isatty(), enable_model_summary=False,
    )  # fmt: skip
    generator, begin = torch.Generator().manual_seed(options.seed), time.perf_counter()
    resume = "last" if options.resume else None
    trainer.fit(classifier, loader(train, shuffle=True, generator=generator), loader(held), ckpt_path=resume)
    seconds = (time.perf_counter() - begin) / max(1, trainer.current_epoch)
    test = loader(TensorDataset(*data.test))
    results = trainer.test(classifier, test, ckpt_path=best.best_model_path or None, verbose=False)[0]
    draw(classifier.model.eval().cpu(), data, folder)
    return {**results, "logit_change": change, "seconds": seconds, "checkpoint": best.best_model_path}


@torch.no_grad()
def draw(model: VisionTransformer, data: ImageSet, folder: Path) -> None:
    """Writes the confusion matrix and, of adaptive attention, the maps and the learned weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (images, labels), few = data.test, len(data.classes) <= 20
    predicted = torch.cat([model(part).argmax(-1) for part in images.split(256)])
    figure = Figure(figsize=(5.6, 5), layout="constrained")
    ConfusionMatrixDisplay.from_predictions(
        labels.numpy(), predicted.numpy(), labels=range(len(data.classes)), include_values=few,
        display_labels=data.classes if few else None, cmap="Blues", xticks_rotation="vertical", ax=figure.subplots(),
    )  # fmt: skip
    figure.savefig(folder / "confusion.png", dpi=100)
    if ah.similarity_parameters(model):
        answers = [
            (data.classes[label], data.classes[answer]) for label, answer in zip(labels[:8], predicted[:8], strict=True)
        ]
        maps(model, images[:8], answers).savefig(folder / "maps.png", dpi=100)
        ah.plots.footprint_weights(model, change=True).savefig(folder / "weights.png", dpi=100)


def maps(model: VisionTransformer, images: Tensor, answers: Sequence[tuple[str, str]]) -> Figure:
    """Draws the attention of the class token in every layer, and in the last one with the dot product everywhere."""
    initial = deepcopy(model)
    for part in initial.modules():
        if isinstance(part, ah.AdaptiveSimilarity):
            part.reset_parameters()
    found, dot = ([*ah.association_maps(each, images).values()] for each in (model, initial))
    rows = {f"layer {number}": weights for number, weights in enumerate(found, 1)}
    return draw_maps(images, {**rows, f"layer {len(found)},\ndot product": dot[-1]}, answers, model.grid)


def draw_maps(images: Tensor, rows: dict[str, Tensor], answers: Sequence[tuple[str, str]], grid: int) -> Figure:
    """Draws images with their true and predicted classes, and named rows of maps ``(n, heads, queries, keys)``.

    A map shows the class token over ``grid * grid`` patches, averaged over the heads. All have one color scale.
    """
    figure = Figure(figsize=(1.2 * len(images) + 1.6, 1.25 * len(rows) + 1.6), layout="constrained")
    axes = figure.subplots(len(rows) + 1, len(images), squeeze=False)
    largest = max(float(weights[:, :, 0, 1:].mean(1).max()) for weights in rows.values())
    for column, (image, (true, predicted)) in enumerate(zip(images, answers, strict=True)):
        color, sign = ("#6a9a3b", "\u2713") if true == predicted else ("#c8555b", "\u2717")
        axes[0, column].imshow(image.permute(1, 2, 0).numpy(), cmap="gray")
        axes[0, column].set(xticks=[], yticks=[])
        axes[0, column].set_title(f"true {true}\npredicted {predicted} {sign}", fontsize="small", color=color)
        for axis, weights in zip(axes[1:, column], rows.values(), strict=True):
            ah.plots.association_map(weights[column], image, (grid, grid), vmax=largest, ax=axis)
    for axis, name in zip(axes[:, 0], ("image", *rows), strict=True):
        axis.set_ylabel(name, rotation=0, ha="right", va="center")
    figure.colorbar(axes[1, 0].images[-1], ax=axes[1:], label="attention weight", shrink=0.9)
    return figure


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Trains and tests a classifier for each attention, prints the table, and returns the test results."""
    shown = type("Help", (argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter), {})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    add, whole = parser.add_argument, {"type": int, "metavar": "N"}
    kinds = ["dot", "adaptive"]
    add("--attention", nargs="+", choices=kinds, default=kinds, help="attentions to compare")
    add("--blocks", **whole, default=4, help="blocks of dimensions that a head sorts; 0 sorts single dimensions")
    add("--model", choices=MODELS, default="tiny", help="tiny: 2 layers of width 64; small: 6 layers of width 192")
    add(
        "--convert",
        type=Path,
        metavar="CHECKPOINT",
        help="fine-tune a model that was trained with dot-product attention",
    )
    add("--data-dir", type=Path, metavar="DIR", help="folder of your own images; the default are digits")
    add("--patch", **whole, help="side of a patch in pixels; the default is 2 for digits, else 4")
    add("--epochs", **whole, default=15, help="number of epochs")
    add("--batch-size", **whole, default=32, help="images per step")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--precision", default="32-true", help="floating-point precision, such as bf16-mixed or 64-true")
    add("--seed", **whole, default=0, help="seed of all random number generators")
    add("--out", type=Path, metavar="DIR", default="out/vit", help="folder for all output files")
    add("--fast-dev-run", action="store_true", help="run one batch of training, validation and test")
    add("--resume", action="store_true", help="continue the interrupted run in the folder of --out")
    options = parser.parse_args(arguments)
    try:
        data = load_images(options.data_dir)
        results = {attention: run(options, data, attention) for attention in options.attention}
    except (ah.AHopError, OSError) as error:
        parser.error(str(error))
    print(f"\n{'attention':<10}{'test accuracy':>15}{'test loss':>11}{'seconds per epoch':>19}")
    for attention, found in results.items():
        figures = f"{found['test_accuracy']:>15.4f}{found['test_loss']:>11.4f}{found['seconds']:>19.1f}"
        print(f"{attention:<10}{figures}")
    if options.convert:
        print("\nlargest change of a logit by conversion:", max(found["logit_change"] for found in results.values()))
    print("\nwritten:", *sorted(options.out.glob("*/*.*")), sep="\n  ")
    return results


if __name__ == "__main__":
    main()
