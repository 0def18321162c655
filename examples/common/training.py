"""Training with Lightning: the trainer of the examples, and a run from the start or from a checkpoint to the test."""

import argparse
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from ahop_layers import AHopError
from examples.common.checkpoints import AtomicCheckpoints, restoring

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # hardware found, tips
warnings.filterwarnings("ignore", ".*exists and is not empty", module="lightning")  # the folder holds options.json


def make_logger(name: str, folder: Path) -> Logger:
    """Returns a logger by its name, ``csv`` or ``tensorboard``, that writes into ``folder/log``."""
    try:
        return (CSVLogger if name == "csv" else TensorBoardLogger)(folder, name="log")
    except ModuleNotFoundError:
        raise AHopError("argument --logger: expected the package tensorboard or tensorboardX, got neither") from None


def make_trainer(
    options: argparse.Namespace,
    monitor: str,
    mode: str,
    save_every: int | None = None,
    callbacks: Sequence[Callback] = (),
    **keywords: Any,
) -> L.Trainer:
    """Returns a trainer that logs, keeps the best and the last checkpoint, and stops early with ``--patience``.

    Args:
        options: of the command line.
        monitor, mode: the measure that chooses the best epoch, and whether it is its ``min`` or ``max``.
        save_every: training steps between two checkpoints to resume from; None: one after each epoch.
        callbacks, keywords: see ``lightning.Trainer``.

    Raises:
        AHopError: this machine does not support the options.
    """
    keep = {"dirpath": options.out, "enable_version_counter": False}
    best = ModelCheckpoint(filename="best", monitor=monitor, mode=mode, **keep)
    last = ModelCheckpoint(filename="last", every_n_train_steps=save_every, **keep)
    stop = [] if options.patience is None else [EarlyStopping(monitor, mode=mode, patience=options.patience)]
    hardware = {
        name: getattr(options, name)
        for name in ("accelerator", "devices", "strategy", "precision")
        if hasattr(options, name)
    }
    logger = make_logger(options.logger, options.out)
    try:
        return L.Trainer(
            **{"devices": 1, **hardware, **keywords}, max_epochs=options.epochs, fast_dev_run=options.fast_dev_run,
            log_every_n_steps=1, num_sanity_val_steps=0, enable_model_summary=False,
            callbacks=[best, last, *stop, *callbacks], plugins=[AtomicCheckpoints()], logger=logger,
        )  # fmt: skip
    except Exception as error:  # Lightning raises one of several types for a value that it does not support
        got = " ".join(f"--{name} {value}" for name, value in hardware.items())
        raise AHopError(f"expected options that this machine supports, got {got}: {error}") from None


class _Started(Callback):
    """Notes that training started, that is, that a checkpoint was restored completely."""

    def __init__(self) -> None:
        self.noted = False

    def on_train_start(self, *_: Any) -> None:
        self.noted = True


def fit_and_test(
    trainer: L.Trainer, module: L.LightningModule, data: L.LightningDataModule, resume: Path | None
) -> dict[str, float]:
    """Trains, from the start or from a checkpoint, and returns the test measures of the best epoch.

    Raises:
        AHopError: the checkpoint does not fit the module.
    """
    started = _Started()
    trainer.callbacks.append(started)
    try:
        trainer.fit(module, data, ckpt_path=resume)
    except Exception as error:
        if resume is None or started.noted:
            raise
        with restoring(resume):
            raise error
    best = trainer.checkpoint_callback.best_model_path if trainer.checkpoint_callback else None
    return dict(trainer.test(module, data, ckpt_path=best or None, verbose=False)[0])
