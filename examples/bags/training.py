"""The training of a bag classifier with Lightning: loss, validation over all bags, and the optimizer."""

from typing import Any

import lightning as L
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import ahop_layers as ah
from examples.bags.batches import Batch
from examples.bags.model import BagClassifier


class BagModule(L.LightningModule):
    """Trains a bag classifier with AdamW and an exponential decay of the learning rate."""

    def __init__(self, model: BagClassifier, lr: float, weight_decay: float, similarity_lr: float) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["model"])
        self.model, self.seen = model, []

    def on_train_epoch_start(self) -> None:
        """Seeds dropout by the epoch, so that a resumed run repeats it."""
        torch.manual_seed(1000 * (1 + self.trainer.datamodule.seed) + self.current_epoch)

    def training_step(self, batch: Batch, number: int) -> Tensor:
        """Returns the loss of a batch."""
        instances, sizes, labels = batch
        loss = binary_cross_entropy_with_logits(self.model(instances, sizes)[0], labels)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(sizes))
        return loss

    def on_validation_epoch_start(self) -> None:
        """Clears the stored logits and labels."""
        self.seen = []

    def validation_step(self, batch: Batch, number: int) -> None:
        """Stores logits and labels of a batch."""
        instances, sizes, labels = batch
        self.seen.append((self.model(instances, sizes)[0].cpu(), labels.cpu()))

    def on_validation_epoch_end(self) -> None:
        """Logs loss and AUC of all bags."""
        logits, labels = (torch.cat(parts) for parts in zip(*self.seen, strict=True))
        part, loss = "test" if self.trainer.testing else "val", binary_cross_entropy_with_logits(logits, labels)
        self.log_dict({f"{part}_auc": roc_auc_score(labels, logits), f"{part}_loss": loss}, prog_bar=True)

    test_step, on_test_epoch_start = validation_step, on_validation_epoch_start
    on_test_epoch_end = on_validation_epoch_end

    def configure_optimizers(self) -> dict[str, Any]:
        """Returns the optimizer; the similarities have their own learning rate, and no weight decay."""
        lr, factor = self.hparams.lr, self.hparams.similarity_lr
        optimizer = torch.optim.AdamW(ah.parameter_groups(self.model, lr, lr * factor, self.hparams.weight_decay))
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.94)}
