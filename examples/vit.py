"""Train a vision transformer with a choice of attention, or convert a trained one and fine-tune it.

To run: python -m examples.vit                                       (digits, adaptive attention, no download)
        python -m examples.vit --blocks 0                            (sorts all dimensions: the paper's footprints)
        python -m examples.vit --attention dot --out out/dot
        python -m examples.vit --convert out/dot/best.ckpt           (outputs are unchanged before fine-tuning)
        python -m examples.vit --data cifar10 --data-dir DIR --model small --augment --precision bf16-mixed

Writes checkpoints, a log, results.json and up to three pictures into the folder of --out: the confusion matrix, the
attention of the class token, and the learned footprint weights. --resume continues an interrupted run.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from torch import Tensor
from torch.nn.functional import cross_entropy

import ahop_layers as ah
from examples.common import cli
from examples.common.checkpoints import check_checkpoint, restoring
from examples.common.kernel_similarity import separation_loss
from examples.common.outputs import write_json
from examples.common.training import fit_and_test, make_trainer
from examples.vision.batches import ImageBatches, as_floats, channel_scale
from examples.vision.data import READERS, SOURCES, ImageSet, load
from examples.vision.model import ATTENTIONS, MODELS, VisionTransformer, cosine, make_optimizer, use_attention
from examples.vision.pictures import draw_pictures

WRITES = ("best.ckpt", "last.ckpt", "results.json", "confusion.png", "maps.png", "weights.png", "log")


class Classifier(L.LightningModule):
    """Trains a vision transformer. Its checkpoints hold all arguments, so that they restore the model."""

    def __init__(
        self,
        model: dict[str, Any],
        attention: str,
        lr: float,
        weight_decay: float,
        similarity_lr: float,
        blocks: int | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = VisionTransformer(**model)
        use_attention(self.model, attention, blocks)

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        """Returns the loss of a batch."""
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss + separation_loss(self.model)

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        """Logs loss and accuracy of a validation batch."""
        self._measure("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        """Logs loss and accuracy of a test batch."""
        self._measure("test", batch)

    def _measure(self, part: str, batch: tuple[Tensor, Tensor]) -> None:
        logits = self.model(batch[0])
        measures = {"loss": cross_entropy(logits, batch[1]), "accuracy": (logits.argmax(-1) == batch[1]).float().mean()}
        for name, value in measures.items():
            self.log(f"{part}_{name}", value, prog_bar=True, batch_size=len(batch[1]), sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """Returns AdamW with cosine decay; linear warm-up only with weight decay, because the paper has neither."""
        decay, total = self.hparams.weight_decay, self.trainer.estimated_stepping_batches
        optimizer = make_optimizer(self.model, self.hparams.lr, decay, self.hparams.similarity_lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, total, 0.05 * bool(decay)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def restore(checkpoint: Path, **changes: Any) -> Classifier:
    """Restores a classifier from a checkpoint, with changes of its hyperparameters.

    Raises:
        AHopError: the file is not a checkpoint of a ``Classifier``.
    """
    check_checkpoint(checkpoint)
    with restoring(checkpoint):
        return Classifier.load_from_checkpoint(checkpoint, map_location="cpu", **changes)


def convert(checkpoint: Path, attention: str, images: Tensor, **changes: Any) -> tuple[Classifier, float]:
    """Restores a dot-product classifier and replaces its attention.

    Args:
        checkpoint: of a classifier with ``attention="dot"``.
        attention: a name of ``ATTENTIONS``.
        images: images to compare the logits on.
        changes: changes of the hyperparameters.

    Returns:
        The classifier in training mode, and the largest absolute change of a logit.

    Raises:
        AHopError: the file is not a checkpoint of such a classifier.
    """
    classifier = restore(checkpoint, **changes).eval()
    if classifier.hparams.attention != "dot":
        raise ah.AHopError(f"expected a checkpoint with dot-product attention, got {classifier.hparams.attention!r}")
    with torch.no_grad():
        before = classifier.model(images)
        use_attention(classifier.model, attention, classifier.hparams.blocks)
        change = (classifier.model(images) - before).abs().max().item()
    classifier.hparams.attention = attention
    return classifier.train(), change


def make_classifier(options: argparse.Namespace, data: ImageSet) -> tuple[Classifier, dict[str, float]]:
    """Returns a new, converted or resumed classifier, and the results of a conversion."""
    learning = {"lr": options.lr, "similarity_lr": options.similarity_lr, "blocks": options.blocks or None}
    results: dict[str, float] = {}
    image, classes = tuple(data.train.images.shape[1:]), len(data.classes)
    if options.resume:
        classifier = restore(options.resume)
    elif options.convert:
        images = as_floats(data.test.images[:256])
        classifier, results["logit_change"] = convert(options.convert, options.attention, images, **learning)
        largest = f"{results['logit_change']:.1e}"
        print(f"converted {options.convert} to {options.attention}; largest absolute change of a logit: {largest}")
    else:
        model = {"image": image, "classes": classes, "patch": options.patch or data.patch}
        model |= {**channel_scale(data.train.images), **MODELS[options.model]}
        decay = 0.0 if options.model == "paper" else 0.05
        classifier = Classifier(model, options.attention, weight_decay=decay, **learning)
    if (classifier.model.image, classifier.model.head.out_features) != (image, classes):
        held = f"images {classifier.model.image} of {classifier.model.head.out_features} classes"
        raise ah.AHopError(f"expected a checkpoint for images {image} of {classes} classes, got one for {held}")
    return classifier, results


def make_parser() -> cli.Parser:
    """Returns the parser of the command line."""
    parser = cli.Parser(
        "vit", __doc__, "out/vit", WRITES, epochs=25, batch_size=128, lr=1e-3, similarity_lr=1.0, patience=10,
        data_dir=cli.default_data_dir(), accelerator="auto", logger="csv", resume=None, fast_dev_run=False,
    )  # fmt: skip
    add = parser.option
    add("--attention", choices=ATTENTIONS, default="adaptive", help="attention of the transformer blocks")
    add("--blocks", type=cli.non_negative_int, metavar="N", default=4,
        help="blocks of dimensions that adaptive attention sorts in each head; 0 sorts single dimensions")  # fmt: skip
    add("--model", choices=MODELS, default="small", help="tiny: 2 blocks; small: 6 blocks; paper: 3 wide blocks")
    add("--data", choices=READERS, default="digits", help="data set; digits comes with scikit-learn")
    add("--download", action="store_true", help="download the data set if it is missing")
    add("--convert", type=Path, metavar="CHECKPOINT", help="fine-tune a model that was trained with --attention dot")
    add("--patch", type=cli.positive_int, metavar="N", help="side of a patch in pixels; the default depends on --data")
    add("--augment", action="store_true", help="shift training images, and flip them unless they are digits")
    add("--precision", default="32-true", help="floating-point precision, such as bf16-mixed or 64-true")
    add("--devices", default="1", help="number of devices, or their indices")
    add("--strategy", default="auto", help="distributed strategy, such as ddp")
    add("--save-every", type=cli.positive_int, metavar="N", default=100, help="steps between checkpoints for --resume")
    return parser


def main(arguments: Sequence[str] | None = None, callbacks: Sequence[Callback] = ()) -> dict[str, float]:
    """Trains and tests a classifier, draws pictures, and returns the test results."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    with parser.one_line_errors():
        return train(parser, options, callbacks)


def train(parser: cli.Parser, options: argparse.Namespace, callbacks: Sequence[Callback]) -> dict[str, float]:
    """Runs the example with parsed options."""
    trainer = make_trainer(
        options, "val_accuracy", "max", options.save_every, [LearningRateMonitor("step"), *callbacks]
    )
    if options.resume or options.convert:
        check_checkpoint(options.resume or options.convert, resume=bool(options.resume))
    L.seed_everything(options.seed, verbose=False)
    try:
        data = load(options.data, options.data_dir, options.download)
    except FileNotFoundError as missing:
        hint = ", or use --download" if options.data in SOURCES else ""
        raise ah.AHopError(f"{options.data}: {missing}{hint}") from None
    classifier, results = make_classifier(options, data)
    batches = ImageBatches(data, options.batch_size, options.seed, options.augment)
    parser.start(options)
    results |= fit_and_test(trainer, classifier, batches, options.resume)
    if trainer.is_global_zero:
        print(f"\n{options.data}, {classifier.hparams.attention}: test accuracy {results['test_accuracy']:.4f}")
        write_json(options.out / "results.json", {"attention": classifier.hparams.attention, **results})
        shown = data.test.cut(32)[0] if options.fast_dev_run else data.test
        print("pictures:", *draw_pictures(classifier.model.eval(), shown, data.classes, options.out))
    return results


if __name__ == "__main__":
    main()
