"""Train a vision transformer with dot-product or adaptive attention, or convert a trained one and fine-tune it.

To run: python -m examples.vit                                       (digits, adaptive attention, no download)
        python -m examples.vit --blocks 0                            (sorts all dimensions: the paper's footprints)
        python -m examples.vit --attention dot --out out/dot
        python -m examples.vit --convert out/dot/best.ckpt           (outputs are unchanged before fine-tuning)
        python -m examples.vit --data cifar10 --data-dir DIR --model small --augment --precision bf16-mixed

Writes checkpoints, a log, results.json and up to three pictures into the folder of --out: the confusion matrix, the
attention of the class token, and the learned footprint weights. --resume continues an interrupted run.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from torch import Tensor
from torch.nn.functional import cross_entropy

import ahop_layers as ah
from benchmarks.image_sets import ImageSet
from benchmarks.images import READERS, load
from examples.common.command import Parser, number
from examples.common.training import add_training_options, fit_and_test, make_trainer, restoring
from examples.vision.batches import ImageBatches, as_floats, channel_scale
from examples.vision.model import MODELS, VisionTransformer
from examples.vision.pictures import draw_pictures

WRITES = ("best.ckpt", "last.ckpt", "results.json", "confusion.png", "maps.png", "weights.png", "log")


class Classifier(L.LightningModule):
    """Trains a vision transformer. Its checkpoints hold all arguments, so that they restore the model."""

    def __init__(
        self, model: dict[str, Any], attention: str, lr: float, similarity_lr: float, blocks: int | None = None
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = VisionTransformer(**model)
        if attention == "adaptive":
            ah.adapt_(self.model, blocks=blocks)

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        """Returns the loss of a batch."""
        loss = cross_entropy(self.model(as_floats(batch[0])), batch[1])
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        """Logs loss and accuracy of a batch."""
        logits, part = self.model(as_floats(batch[0])), "test" if self.trainer.testing else "val"
        measures = {"loss": cross_entropy(logits, batch[1]), "accuracy": (logits.argmax(-1) == batch[1]).float().mean()}
        for name, value in measures.items():
            self.log(f"{part}_{name}", value, prog_bar=True, batch_size=len(batch[1]), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> dict[str, Any]:
        """Returns AdamW with linear warm-up and cosine decay; the similarities have a learning rate of their own."""
        rates = self.hparams.lr, self.hparams.lr * self.hparams.similarity_lr
        optimizer = torch.optim.AdamW(ah.parameter_groups(self.model, *rates, weight_decay=0.05))
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, [group["lr"] for group in optimizer.param_groups], self.trainer.estimated_stepping_batches,
            pct_start=0.05, cycle_momentum=False,
        )  # fmt: skip
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def convert(checkpoint: Path, attention: str, images: Tensor, **changes: Any) -> tuple[Classifier, float]:
    """Restores a dot-product classifier, with changes of its hyperparameters, and replaces its attention.

    Returns the classifier in training mode, and the largest absolute change of a logit of the images.
    """
    with restoring(checkpoint):
        classifier = Classifier.load_from_checkpoint(checkpoint, map_location="cpu", **changes).eval()
    if classifier.hparams.attention != "dot":
        raise ah.AHopError(f"expected a checkpoint with dot-product attention, got {classifier.hparams.attention!r}")
    with torch.no_grad():
        before = classifier.model(images)
        if attention == "adaptive":
            ah.adapt_(classifier.model, blocks=classifier.hparams.blocks)
        change = (classifier.model(images) - before).abs().max().item()
    classifier.hparams.attention = attention
    return classifier.train(), change


def make_classifier(options: argparse.Namespace, data: ImageSet) -> tuple[Classifier, dict[str, float]]:
    """Returns a new or a converted classifier, and the results of a conversion."""
    learning = {"lr": options.lr, "similarity_lr": options.similarity_lr, "blocks": options.blocks or None}
    if options.convert:
        images = as_floats(data.test.images[:256])
        classifier, change = convert(options.convert, options.attention, images, **learning)
        print(f"converted {options.convert} to {options.attention}; largest absolute change of a logit: {change:.1e}")
        return classifier, {"logit_change": change}
    model = {"image": tuple(data.train.images.shape[1:]), "classes": len(data.classes)}
    model |= {"patch": options.patch or data.patch, **channel_scale(data.train.images), **MODELS[options.model]}
    return Classifier(model, options.attention, **learning), {}


def make_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser("vit", __doc__, WRITES)
    add_training_options(parser, epochs=25, batch_size=128, patience=10)
    add = parser.add_argument
    add("--attention", choices=("dot", "adaptive"), default="adaptive", help="attention of the transformer blocks")
    add("--blocks", type=number(int, 0), metavar="N", default=4,
        help="blocks of dimensions that adaptive attention sorts in each head; 0 sorts single dimensions")  # fmt: skip
    add("--model", choices=MODELS, default="small", help="tiny: 2 blocks; small: 6 blocks")
    add("--data", choices=READERS, default="digits", help="data set; digits comes with scikit-learn")
    add("--download", action="store_true", help="download the data set if it is missing")
    add("--convert", type=Path, metavar="CHECKPOINT", help="fine-tune a model that was trained with --attention dot")
    add("--patch", type=number(int, 1), metavar="N", help="side of a patch in pixels; the default depends on --data")
    add("--augment", action="store_true", help="shift training images, and flip them unless they are digits")
    add("--precision", default="32-true", help="floating-point precision, such as bf16-mixed or 64-true")
    add("--devices", default="1", help="number of devices, or their indices")
    add("--strategy", default="auto", help="distributed strategy, such as ddp")
    add("--save-every", type=number(int, 1), metavar="N", default=100, help="steps between checkpoints for --resume")
    return parser


def main(arguments: Sequence[str] | None = None, callbacks: Sequence[Callback] = ()) -> dict[str, float]:
    """Trains and tests a classifier, draws pictures, and returns the test results."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    with parser.one_line_errors():
        hardware = {name: getattr(options, name) for name in ("devices", "strategy", "precision")}
        trainer = make_trainer(options, "val_accuracy", "max", [LearningRateMonitor("step"), *callbacks], **hardware)
        L.seed_everything(options.seed, verbose=False)
        data = load(options.data, options.data_dir, options.download)
        classifier, results = make_classifier(options, data)
        batches = ImageBatches(data, options.batch_size, options.seed, options.augment)
        parser.start(options)
        results |= fit_and_test(trainer, classifier, batches, options)
        if trainer.is_global_zero:
            print(f"\n{options.data}, {options.attention}: test accuracy {results['test_accuracy']:.4f}")
            (options.out / "results.json").write_text(json.dumps(results, indent=1))
            shown = data.test.cut(32)[0] if options.fast_dev_run else data.test
            print("pictures:", *draw_pictures(classifier.model.eval(), shown, data.classes, options.out))
    return results


if __name__ == "__main__":
    main()
