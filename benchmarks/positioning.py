"""Indoor positioning by Wi-Fi fingerprints: the mean error in meters of nearest neighbors, by the distance.

To run: python -m benchmarks.positioning [--data FOLDER] [--sets DSI1 UJI1] [--seeds 1]

A fingerprint is the signal strength of each access point at a place, in dBm; those that are not heard have none. The
12 data sets are those of Torres-Sospedra et al. (2020, doi 10.5281/zenodo.3751042) whose test places are known, with
their published training and test fingerprints (see docs/data.md). A position is the mean of those of the 1 or 11
nearest training fingerprints, in three dimensions.

The rivals are nearest neighbors by four distances. Signals are positive, from 1 dBm below the weakest of the
training set, with 0 for what is not heard; or powed, that is raised to the power e and divided by a constant, as is
common (Torres-Sospedra et al. 2015). Ours is AdaptiveNeighborsRegressor with its
default arguments, which gets NaN for what is not heard. Nothing is chosen on test fingerprints. Two further rows
attribute its gain: learned factors of distances without ranks, and the best fixed trimming of Sorensen's differences.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import normalize

from ahop_layers.tabular import AdaptiveNeighborsRegressor
from ahop_layers.tabular.distances import sparse_manhattan
from benchmarks.harness.command import default_data_dir, explain_missing_data, make_parser
from benchmarks.harness.report import bold_best, group, table
from benchmarks.harness.rows import RESULTS, ResultTable, Row

SETS = ("DSI1", "DSI2", "LIB1", "LIB2", "TUT1", "TUT2", "TUT3", "TUT4", "TUT5", "TUT6", "TUT7", "UJI1")
NEIGHBORS = (1, 11)
NOT_HEARD = 100
QUERIES = 512  # compared at once

RIVALS = {
    f"{kind}{', powed' if power > 1 else ''}": (kind, power)
    for power in (1.0, np.e)
    for kind in ("Euclid", "L1", "cosine", "Sorensen")
}
"""Name of a rival -> its distance, and the power of the signals."""

OURS = "adaptive, default"
OWN = {OURS: "auto", "not sorted": "not sorted", "fixed trimming": "trimmed"}
"""Name of a row of ours -> its similarity. All but the first show what sorting and learning bring."""

Array = NDArray[np.float64]


class Places(NamedTuple):
    """Training fingerprints with NaN for what is not heard, their positions in meters, and the same for tests."""

    stored: Array
    position: Array
    asked: Array
    target: Array


def load(folder: Path, name: str) -> Places:
    """Loads a data set."""
    from scipy.io import loadmat  # the table does not need it

    with (folder / f"{name}.mat").open("rb") as file:
        data = loadmat(file)["database"][0, 0]
    signals = [data[key].astype(np.float64) for key in ("trainingMacs", "testMacs")]
    stored, asked = (np.where(each == NOT_HEARD, np.nan, each) for each in signals)
    position, target = (data[key][:, :3].astype(np.float64) for key in ("trainingLabels", "testLabels"))
    return Places(stored, position, asked, target)


def rival_neighbors(places: Places, kind: str, power: float) -> NDArray[np.int64]:
    """Returns the nearest positive or powed fingerprints of each test ``(n, k)``, nearest first."""
    lowest = np.nanmin(places.stored) - 1
    stored, asked = (
        torch.from_numpy((np.nan_to_num(np.maximum(each - lowest, 0.0), nan=0.0) / -lowest) ** power)
        for each in (places.stored, places.asked)
    )
    found = []
    for query in torch.split(asked, QUERIES):
        if kind == "Euclid":
            distance = torch.cdist(query, stored)
        elif kind == "cosine":
            distance = -normalize(query, dim=-1) @ normalize(stored, dim=-1).mT
        else:
            distance = sparse_manhattan(query, stored)
        if kind == "Sorensen":
            distance = distance / (query.sum(-1, keepdim=True) + stored.sum(-1)).clamp(min=1e-9)
        found.append(distance.argsort(stable=True)[:, : max(NEIGHBORS)])  # equal distances are ordered by index
    return torch.cat(found).numpy()


def measure(places: Places, method: str, seed: int) -> list[Row]:
    """Returns the mean error of a method for each number of neighbors, what it chose, and its times."""
    rows, rivals = [], rival_neighbors(places, *RIVALS[method]) if method in RIVALS else None
    for count in NEIGHBORS:
        row = {"method": method, "seed": str(seed), "neighbors": str(count)}
        if rivals is not None:
            predicted = places.position[rivals[:, :count]].mean(1)
        else:
            start = time.perf_counter()
            model = AdaptiveNeighborsRegressor(count, similarity=OWN[method], random_state=seed)
            model.fit(places.stored, places.position)
            fitted = time.perf_counter()
            predicted = model.predict(places.asked)
            row |= {"chosen": model.similarity_, "fit_s": f"{fitted - start:.3g}"}
            row |= {"predict_s": f"{time.perf_counter() - fitted:.3g}"}
        error = np.linalg.norm(predicted - places.target, axis=-1).mean()
        rows.append({**row, "error_m": f"{error:.4f}"})
    return rows


def errors(rows: Sequence[Row], count: int) -> dict[str, dict[str, float]]:
    """Returns the error by method and data set: the mean over the seeds."""
    found: dict[str, dict[str, float]] = {}
    for (method, data, neighbors), mine in group(rows, "method", "data", "neighbors").items():
        if int(neighbors) == count:
            found.setdefault(method, {})[data] = mean(float(row["error_m"]) for row in mine)
    return found


def ranks(found: dict[str, dict[str, float]], methods: Sequence[str], sets: Sequence[str]) -> dict[str, float]:
    """Returns the mean rank of each method over the data sets; equal errors share the mean of their ranks."""
    values = np.array([[found[method][data] for data in sets] for method in methods])
    better = (values[:, None] > values).sum(1) + ((values[:, None] == values).sum(1) + 1) / 2
    return dict(zip(methods, better.mean(1).tolist(), strict=True))


def report(rows: Sequence[Row]) -> str:
    """Returns a table for each number of neighbors, with mean ranks, and says where ours is not the best."""
    return "\n\n".join(part for count in NEIGHBORS if (part := _part(errors(rows, count), count)))


def _part(found: dict[str, dict[str, float]], count: int) -> str:
    compared = [method for method in (*RIVALS, OURS) if method in found]
    sets = [data for data in SETS if all(data in found[method] for method in compared)]
    if OURS not in compared or not sets:
        return ""
    rank, body = ranks(found, compared, sets), []
    for method in (each for each in (*RIVALS, *OWN) if each in found):
        cells = [f"{found[method][data]:.2f}" if data in found[method] else "" for data in sets]
        body.append([method, *cells, f"{rank[method]:.2f}" if method in rank else ""])
    compared_rows = len(compared)
    columns = [list(column) for column in zip(*body, strict=True)]
    for place in range(1, len(columns)):
        columns[place][:compared_rows] = bold_best(columns[place][:compared_rows], min)
    lost = []
    for data in sets:
        best = min(compared, key=lambda method: found[method][data])
        if found[best][data] < found[OURS][data]:
            lost.append(f"{data} ({best} {found[best][data]:.2f}, ours {found[OURS][data]:.2f})")
    title = f"Mean error in meters with {count} neighbor{'s' if count > 1 else ''}, and the mean rank of the distances."
    note = f"*{OURS}* is not the best on {', '.join(lost)}." if lost else f"*{OURS}* is the best on every set."
    shown = table(["distance", *sets, "mean rank"], zip(*columns, strict=True))
    return f"{title} The best distance is bold. The last two rows attribute the gain of *{OURS}*.\n\n{shown}\n\n{note}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the missing rows and prints the tables."""
    parser = make_parser("positioning", __doc__)
    add = parser.add_argument
    add("--data", type=Path, default=default_data_dir() / "wifi", help="folder of the .mat files (default: data/wifi)")
    add("--sets", nargs="+", choices=SETS, default=SETS, metavar="SET", help="data sets (default: all)")
    add("--methods", nargs="+", choices=(*RIVALS, *OWN), default=(*RIVALS, *OWN), help="methods (default: all)")
    add("--seeds", type=int, default=1, help="number of seeds of ours (default: %(default)s)")
    add("--output", type=Path, default=RESULTS / "positioning.csv", help="results (default: %(default)s)")
    options = parser.parse_args(arguments)
    results = ResultTable(options.output, "cpu")
    for name in options.sets:
        with explain_missing_data():
            places = load(options.data, name)
        for method in options.methods:
            for seed in range(1 if method in RIVALS else options.seeds):
                if not results.has({"data": name, "method": method, "seed": seed}):
                    rows = [{"data": name, **row} for row in measure(places, method, seed)]
                    results.add(*rows)
                    print(*rows, sep="\n", flush=True)
    print(report(results.own_rows))


if __name__ == "__main__":
    main()
