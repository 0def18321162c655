"""Training with Lightning: options, trainer, checkpoints, and a run from the start or a checkpoint to the test."""

import argparse
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from ahop_layers import AHopError
from examples.common.command import Parser, number

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # hardware found, tips
warnings.filterwarnings("ignore", ".*exists and is not empty", module="lightning")  # the folder holds the options


def add_training_options(parser: Parser, epochs: int | None, batch_size: int | None, patience: int | None) -> None:
    """Adds the options of training, with the defaults of an example."""
    add, count = parser.add_argument, number(int, 1)
    add("--epochs", type=count, metavar="N", default=epochs, help="number of epochs")
    add("--batch-size", type=count, metavar="N", default=batch_size, help="samples per step, over all devices")
    add("--lr", type=number(float, 0), default=1e-3, help="learning rate")
    add("--similarity-lr", type=number(float, 0), metavar="FACTOR", default=1.0,
        help="learning-rate multiplier of the similarity parameters")  # fmt: skip
    add("--patience", type=count, metavar="N", default=patience,
        help="stop after this many epochs without improvement on the validation data")  # fmt: skip
    add("--data-dir", type=Path, metavar="DIR", default=os.environ.get("AHOP_DATA_DIR", "data"),
        help="folder of the data sets; the environment variable AHOP_DATA_DIR changes the default")  # fmt: skip
    add("--accelerator", default="auto", help="hardware to train on: auto, cpu, gpu, or another name of Lightning")
    add("--logger", choices=("csv", "tensorboard"), default="csv", help="format of the training log")
    add("--fast-dev-run", action="store_true", help="run one batch of training, validation and test")
    add("--resume", action="store_true", help="continue the interrupted run in the folder of --out, from last.ckpt")


def make_trainer(
    options: argparse.Namespace, monitor: str, mode: str, callbacks: Sequence[Callback] = (), **keywords: Any
) -> L.Trainer:
    """Returns a trainer that logs, keeps the best and the last checkpoint, and stops early with ``--patience``.

    The best epoch has the ``min`` or ``max`` of the measure ``monitor``.
    """
    keep = {"dirpath": options.out, "enable_version_counter": False}
    best = ModelCheckpoint(filename="best", monitor=monitor, mode=mode, **keep)
    last = ModelCheckpoint(filename="last", every_n_train_steps=getattr(options, "save_every", None), **keep)
    stop = [EarlyStopping(monitor, mode=mode, patience=options.patience)] if options.patience else []
    try:
        return L.Trainer(
            **{"devices": 1, "accelerator": options.accelerator, **keywords}, max_epochs=options.epochs,
            fast_dev_run=options.fast_dev_run, callbacks=[best, last, *stop, *callbacks],
            logger=(CSVLogger if options.logger == "csv" else TensorBoardLogger)(options.out, name="log"),
            log_every_n_steps=1, num_sanity_val_steps=0, enable_model_summary=False,
        )  # fmt: skip
    except Exception as error:  # Lightning raises one of several types for a value that it does not support
        raise AHopError(f"expected options that this machine supports, got: {error}") from None


@contextmanager
def restoring(path: Path) -> Iterator[None]:
    """Turns any error of restoring a checkpoint, such as a damaged file or other shapes, into an ``AHopError``."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[:2]  # torch lists every tensor that does not fit
        raise AHopError(f"expected a checkpoint of this model, got {path} ({' '.join(reason)})") from None


def fit_and_test(
    trainer: L.Trainer, module: L.LightningModule, data: L.LightningDataModule, options: argparse.Namespace
) -> dict[str, float]:
    """Trains, from the start or from a checkpoint, and returns the test measures of the best epoch."""
    checkpoint = options.out / "last.ckpt" if options.resume else None
    if checkpoint is not None:
        with restoring(checkpoint):
            held = torch.load(checkpoint, map_location="cpu", weights_only=True)
            module.load_state_dict(held["state_dict"])
            for name in ("loops", "optimizer_states", "lr_schedulers"):  # without them, Lightning starts at epoch 0
                held[name]
    trainer.fit(module, data, ckpt_path=checkpoint)
    best = trainer.checkpoint_callback.best_model_path if trainer.checkpoint_callback else None
    return dict(trainer.test(module, data, ckpt_path=best or None, verbose=False)[0])
