"""Published data sets of bags, for the bag benchmark. docs/data.md lists the files."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ahop_layers import AHopError
from benchmarks.bag_sets import BagSet


def _from_npz(name: str) -> Callable[[Path], BagSet]:
    def read(where: Path) -> BagSet:
        path = where / "mil" / f"{name}.npz"
        if not path.exists():
            raise AHopError(f"expected the data in {path}, got no such file; see --data-dir and AHOP_DATA_DIR")
        try:
            with np.load(path) as file:
                instances, sizes, labels = (torch.from_numpy(file[key]) for key in ("X", "bag_sizes", "y"))
                splits = torch.from_numpy(file["cv_train_mask"]).bool() if "cv_train_mask" in file else None
            bags = instances.float().split(sizes.tolist())
            if not all(bag.isfinite().all() for bag in bags):
                raise ValueError("features that are not finite float32 numbers")
        except Exception as error:  # a damaged file raises one of many types
            reason = f"{type(error).__name__}: {error}"
            raise AHopError(f"{path}: expected arrays X, bag_sizes and y, got {reason}") from None
        names = [f"{name} {number}" for number in range(len(bags))]
        return BagSet(names, labels.float(), instances.shape[1], bags.__getitem__, splits=splits)

    return read


def auc(labels: Tensor, scores: Tensor) -> float:
    """Computes the area under the ROC curve; a tie counts half. NaN if a label is missing."""
    above, below = scores[labels == 1], scores[labels == 0]
    difference = above[:, None] - below
    return ((difference > 0).double() + 0.5 * (difference == 0)).mean().item()


DATA_SETS: dict[str, Callable[[Path], BagSet]] = {
    "tiger": _from_npz("tiger"),
    "fox": _from_npz("fox"),
    "elephant": _from_npz("elephant"),
    "ucsb": _from_npz("ucsb_breast_cancer"),
}
