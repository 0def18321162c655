"""What a fit finds beside the weights of a similarity: one value, and its tensors in a state dict."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ahop_layers.errors import AHopError
from ahop_layers.similarity.adaptive import check_tensor

FOREIGN = 1024  # number of confidences of unknown queries that are kept
CLOSED, OPEN, WEIGHED = 1, 2, 3  # the gate of repair: unknown values only; all values; neighbors are weighed again
RULES = {
    "beta": "a positive number",
    "foreign": "a number between 0 and 1",
    "fit_counts": "a number of at least 0",
    "shortlist": "a number of at least 0",
    **dict.fromkeys(("mixture.spread", "mixture.gate", "mixture.least"), "a number of at least 0"),
}


class Calibration(NamedTuple):
    """How scores become confidences: a factor of the scores, and weights of the log-sum-exp, the log odds and 1."""

    factor: float
    weights: tuple[float, float, float]


class Mixture(NamedTuple):
    """What repair needs to know.

    Attributes:
        spread: how far intact values are from their neighbors ``(d,)``.
        gate: what repair may do, 0 if there were too few patterns to find out.
        least: share of wrong values from which on a row is repaired, unless a value is wild.
    """

    spread: Tensor
    gate: int = 0
    least: float = 0.0


@dataclass(frozen=True, eq=False)
class Fitted:
    """What a fit finds.

    Attributes:
        mixture: what repair needs to know.
        calibration: how scores become confidences, or None: the patterns were all equal, or of one class.
        foreign: quantiles of the confidences of unknown queries ``(FOREIGN,)``.
        shortlist: the length of ``shortlist="auto"``, or 0: it was not measured.
        count, changes: number of patterns at the fit, 0 before any, and of those added or removed since.
    """

    mixture: Mixture
    calibration: Calibration | None
    foreign: Tensor
    shortlist: int = 0
    count: int = 0
    changes: int = 0

    @classmethod
    def none(cls, dim: int, dtype: torch.dtype, device: torch.device) -> "Fitted":
        """Returns what is known before a fit."""
        spread = torch.zeros(dim, dtype=dtype, device=device)
        return cls(Mixture(spread), None, torch.zeros(FOREIGN, device=device))

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of a state dict."""
        factor, weights = self.calibration or (0.0, (0.0, 0.0, 0.0))
        spread, gate, least = self.mixture
        device = spread.device
        return {
            "calibration": torch.tensor([factor, *weights], dtype=torch.float64, device=device),
            "foreign": self.foreign,
            "fit_counts": torch.tensor([self.count, self.changes], device=device),
            "shortlist": torch.tensor(self.shortlist, device=device),
            "mixture.spread": spread,
            "mixture.gate": torch.tensor(gate, device=device),
            "mixture.least": torch.tensor(least, dtype=spread.dtype, device=device),
        }

    @classmethod
    def loaded(cls, tensors: Mapping[str, Tensor]) -> "Fitted":
        """Returns what :meth:`tensors` describes."""
        factor, first, second, third = tensors["calibration"].tolist()
        spread, gate, least = (tensors[f"mixture.{name}"] for name in Mixture._fields)
        calibration = Calibration(factor, (first, second, third)) if factor else None
        mixture = Mixture(spread, int(gate), least.item())
        return cls(mixture, calibration, tensors["foreign"], int(tensors["shortlist"]), *tensors["fit_counts"].tolist())


def check_tensors(own: Mapping[str, Tensor], given: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the tensors ``given`` as those of ``own`` with the same names, or raises."""
    for name, tensor in given.items():
        check_tensor(prefix + name, tensor, own[name], RULES.get(name))
        if tensor.shape != own[name].shape:
            raise AHopError(f"{prefix}{name} must have the shape {tuple(own[name].shape)}, got {tuple(tensor.shape)}")
    if "calibration" in given and given["calibration"][0] < 0:
        got = given["calibration"].tolist()
        raise AHopError(f"{prefix}calibration must have a factor of at least 0, got {got}")
    return {name: tensor.detach().to(own[name], copy=True) for name, tensor in given.items()}
