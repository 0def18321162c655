"""Train a vision transformer with the attention of your choice, or convert a trained one and fine-tune it.

To run: python examples/vit.py                                        (digits, adaptive attention, no download)
        python examples/vit.py --attention dot --out out/dot
        python examples/vit.py --convert out/dot/best.ckpt            (its outputs stay; then it learns on)
        python examples/vit.py --data cifar10 --data-dir DIR --model small --augment --precision bf16-mixed

Writes checkpoints, a log, results.json and three pictures into the folder of --out: the confusion of classes, where
the class token looks, and the learned footprint weights. A run that was interrupted goes on with --resume.
"""

import argparse
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn.functional import cross_entropy

import ahop_layers as ah
from examples.common.checkpoints import WholeCheckpoints, check_checkpoint
from examples.common.kernel_similarity import separation_loss
from examples.common.outputs import output_folder
from examples.vision.batches import ImageBatches, as_floats, channel_scale
from examples.vision.data import READERS, SOURCES, ImageSet, load
from examples.vision.model import ATTENTIONS, MODELS, VisionTransformer, cosine, make_optimizer, use_attention
from examples.vision.pictures import draw_pictures

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # it says what hardware there is, and more


class Classifier(L.LightningModule):
    """A vision transformer that learns; everything needed to build it again stands in its checkpoints."""

    def __init__(
        self, model: dict[str, Any], attention: str, lr: float, weight_decay: float, similarity_lr: float
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = VisionTransformer(**model)
        use_attention(self.model, attention)

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        """The loss of a batch."""
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss + separation_loss(self.model)

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        """Loss and accuracy on images held out."""
        self._measure("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        """Loss and accuracy on test images."""
        self._measure("test", batch)

    def _measure(self, part: str, batch: tuple[Tensor, Tensor]) -> None:
        logits = self.model(batch[0])
        measures = {"loss": cross_entropy(logits, batch[1]), "accuracy": (logits.argmax(-1) == batch[1]).float().mean()}
        for name, value in measures.items():
            self.log(f"{part}_{name}", value, prog_bar=True, batch_size=len(batch[1]), sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW with a warm-up (Adam without one where there is no decay, as in the paper), down along a cosine."""
        decay, total = self.hparams.weight_decay, self.trainer.estimated_stepping_batches
        optimizer = make_optimizer(self.model, self.hparams.lr, decay, self.hparams.similarity_lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, total, 0.05 * bool(decay)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def convert(checkpoint: Path, attention: str, images: Tensor, **changes: Any) -> tuple[Classifier, float]:
    """A trained classifier with another attention, and the largest change of a logit on some images."""
    classifier = Classifier.load_from_checkpoint(checkpoint, map_location="cpu", **changes).eval()
    if classifier.hparams.attention != "dot":
        raise ah.AHopError(f"expected a checkpoint with dot-product attention, got {classifier.hparams.attention!r}")
    with torch.no_grad():
        before = classifier.model(images)
        use_attention(classifier.model, attention)
        change = (classifier.model(images) - before).abs().max().item()
    classifier.hparams.attention = attention
    return classifier.train(), change


def make_trainer(options: argparse.Namespace, callbacks: Sequence[Callback]) -> L.Trainer:
    """A trainer that logs, shows its progress, stops when nothing improves, and can be interrupted at any time."""
    keep = {"dirpath": options.out, "enable_version_counter": False}
    best = ModelCheckpoint(filename="best", monitor="val_accuracy", mode="max", **keep)
    last = ModelCheckpoint(filename="last", every_n_train_steps=options.save_every, **keep)
    stop = EarlyStopping("val_accuracy", mode="max", patience=options.patience)
    return L.Trainer(
        accelerator=options.accelerator, devices=options.devices, strategy=options.strategy,
        precision=options.precision, max_epochs=options.epochs, fast_dev_run=options.fast_dev_run,
        log_every_n_steps=1, num_sanity_val_steps=0,
        callbacks=[best, last, stop, LearningRateMonitor("step"), *callbacks], plugins=[WholeCheckpoints()],
        logger=CSVLogger(options.out, name="log"), enable_model_summary=False,
    )  # fmt: skip


def make_classifier(options: argparse.Namespace, data: ImageSet) -> tuple[Classifier, dict[str, float]]:
    """A new classifier, a converted one, or the one of an interrupted run; and what is to be said about it."""
    learning = {"lr": options.lr, "similarity_lr": options.similarity_lr}
    if options.resume:
        return Classifier.load_from_checkpoint(options.resume, map_location="cpu"), {}
    if options.convert:
        images = as_floats(data.test.images[:256])
        classifier, change = convert(options.convert, options.attention, images, **learning)
        print(f"converted {options.convert} to {options.attention}: no logit changed by more than {change:.1e}")
        return classifier, {"logit_change": change}
    model = {
        "image": tuple(data.train.images.shape[1:]),
        "classes": len(data.classes),
        "patch": options.patch or data.patch,
        **channel_scale(data.train.images),
        **MODELS[options.model],
    }
    decay = 0.0 if options.model == "paper" else 0.05
    return Classifier(model, options.attention, weight_decay=decay, **learning), {}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    home = os.environ.get("AHOP_DATA_DIR", "data")
    add("--attention", choices=ATTENTIONS, default="adaptive", help="how tokens find each other (adaptive)")
    add("--model", choices=MODELS, default="small", help="tiny: 2 blocks; small: 6 blocks, 3 heads; paper: 3 wide ones")
    add("--data", choices=READERS, default="digits", help="digits (the default) comes with scikit-learn")
    add("--data-dir", type=Path, default=Path(home), help="where data sets lie (AHOP_DATA_DIR, else data)")
    add("--download", action="store_true", help="fetch the data set if it is not there")
    add("--convert", type=Path, metavar="CHECKPOINT", help="start from a model trained with --attention dot")
    add("--resume", nargs="?", const="last", metavar="CHECKPOINT", help="go on with an interrupted run of this --out")
    add("--epochs", type=int, default=25, help="how often to see all images (25)")
    add("--batch-size", type=int, default=128, help="images in a step, all devices together (128)")
    add("--patch", type=int, help="side of a patch in pixels (2 for digits, 8 for tiny-imagenet, else 4)")
    add("--lr", type=float, default=1e-3, help="the largest learning rate (0.001)")
    add("--similarity-lr", type=float, default=1.0, help="similarities learn so many times as fast as the rest (1)")
    add("--augment", action="store_true", help="shift and mirror training images (digits are only shifted)")
    add("--patience", type=int, default=10, help="stop after so many epochs without a better one (10)")
    add("--precision", default="32-true", help="32-true, bf16-mixed, 64-true and others of Lightning (32-true)")
    add("--accelerator", default="auto", help="cpu, gpu and others of Lightning (what there is)")
    add("--devices", default="1", help="how many devices, or which (1)")
    add("--strategy", default="auto", help="how devices work together, such as ddp (auto)")
    add("--save-every", type=int, default=100, help="steps between two checkpoints for --resume (100)")
    add("--seed", type=int, default=0, help="every random choice follows from it (0)")
    add("--out", type=output_folder, default="out/vit", help="folder for everything that is written (out/vit)")
    add("--fast-dev-run", action="store_true", help="one batch of everything, nothing written but the pictures")
    options = parser.parse_args(arguments)
    if options.resume:
        options.resume = options.out / "last.ckpt" if options.resume == "last" else Path(options.resume)
    for path in filter(None, (options.resume, options.convert)):
        check_checkpoint(path)
    return options


def main(arguments: Sequence[str] | None = None, callbacks: Sequence[Callback] = ()) -> dict[str, float]:
    """Train, test, draw; returns the test results."""
    options = parse(arguments)
    L.seed_everything(options.seed, verbose=False)
    try:
        data = load(options.data, options.data_dir, options.download)
    except FileNotFoundError as missing:
        fetch = ", or fetch it by --download" if options.data in SOURCES else ""
        raise SystemExit(f"{options.data}: {missing}{fetch}") from None
    classifier, results = make_classifier(options, data)
    trainer = make_trainer(options, callbacks)
    batches = ImageBatches(data, options.batch_size, options.seed, options.augment)
    trainer.fit(classifier, batches, ckpt_path=options.resume)
    best = trainer.checkpoint_callback.best_model_path if trainer.checkpoint_callback else None
    results |= trainer.test(classifier, batches, ckpt_path=best or None, verbose=False)[0]
    if trainer.is_global_zero:
        print(f"\n{options.data}, {classifier.hparams.attention}: test accuracy {results['test_accuracy']:.4f}")
        options.out.mkdir(parents=True, exist_ok=True)
        shown = data.test.cut(32)[0] if options.fast_dev_run else data.test
        pictures = draw_pictures(classifier.model.eval(), shown, data.classes, options.out)
        part = options.out / "results.json.part"
        part.write_text(json.dumps({"attention": classifier.hparams.attention, **results}, indent=1))
        os.replace(part, options.out / "results.json")
        print("pictures:", *pictures)
    return results


if __name__ == "__main__":
    try:
        main()
    except ah.AHopError as error:
        raise SystemExit(str(error)) from None
