"""Wi-Fi fingerprints for indoor positioning: the 12 data sets of docs/data.md whose test places are known."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.io import loadmat

SETS = ("DSI1", "DSI2", "LIB1", "LIB2", "TUT1", "TUT2", "TUT3", "TUT4", "TUT5", "TUT6", "TUT7", "UJI1")
NOT_HEARD = 100  # stands for the signal of an access point that is not heard


class Fingerprints(NamedTuple):
    """Signals in dBm ``(n, access points)``, NaN if not heard, and positions in meters ``(n, 3)``, for both parts."""

    stored: np.ndarray
    position: np.ndarray
    asked: np.ndarray
    target: np.ndarray


def load(folder: Path, name: str) -> Fingerprints:
    """Reads the training and the test part of a data set of SETS from ``folder/NAME.mat``."""
    with (folder / f"{name}.mat").open("rb") as file:  # loadmat names no folder in its error
        data = loadmat(file)["database"][0, 0]
    signals = (data[part].astype(np.float64) for part in ("trainingMacs", "testMacs"))
    stored, asked = (np.where(each == NOT_HEARD, np.nan, each) for each in signals)
    position, target = (data[part][:, :3].astype(np.float64) for part in ("trainingLabels", "testLabels"))
    return Fingerprints(stored, position, asked, target)
