"""Faces behind sunglasses and scarves: the AR database in the two protocols with published results.

Martinez and Benavente (1998) photographed 100 people of the usual selection 26 times, in two sessions two weeks apart.
The database is for research and must be asked for: no photo of it is part of this project. The file is a matrix of
42 x 30 pixels, as many authors use it: column by column, 26 photos in a row for each person.

Similarities and networks are learned from the stored photos with synthetic rectangles. No disguise is seen.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ahop_layers.memory.variants import Covered
from benchmarks.harness.memory import clock
from benchmarks.harness.report import bold_best_in_columns, group, spread, table
from benchmarks.harness.rows import ResultTable, Row
from benchmarks.search.data import Images
from benchmarks.search.packaged import OURS, OWN, untrained_shifted
from benchmarks.search.rivals import RIVALS, Training

PEOPLE, PHOTOS, SHAPE, COVERED = 100, 26, (42, 30), (0.0, 0.6)
SEEDS = 5


class Protocol(NamedTuple):
    """The numbers of the stored photos of each person, from 1 on, and those of each column of queries."""

    stored: Sequence[int]
    asked: dict[str, Sequence[int]]


PROTOCOLS = {
    "4 stored": Protocol(
        (1, 5, 6, 7),
        {
            "sunglasses 1": range(8, 11),
            "scarf 1": range(11, 14),
            "sunglasses 2": range(21, 24),
            "scarf 2": range(24, 27),
        },
    ),
    "8 stored": Protocol((1, 2, 3, 4, 14, 15, 16, 17), {"sunglasses": (8, 21), "scarf": (11, 24)}),
}

PUBLISHED: dict[str, dict[str, tuple[float, ...]]] = {
    "4 stored": {
        "SRC, published": (0.893, 0.323, 0.573, 0.127),
        "RSC, published": (0.947, 0.910, 0.803, 0.727),
        "RRC with L1, published": (0.990, 0.933, 0.893, 0.763),
    },
    "8 stored": {"SRC, published": (0.870, 0.595), "RSC, published": (0.990, 0.970)},
}
"""Results of Wright et al. (2009), Yang et al. (CVPR 2011) and Yang et al. (IEEE TIP 2013), in this protocol."""

METHODS: dict[str, Training] = {
    **{name: RIVALS[name] for name in RIVALS if name not in ("Euclid", "cosine", "trimmed L1 of contrasts")},
    **OWN,
    "fixed trimming, nine shifts": untrained_shifted,
}
SEEDED = ("trimmed L1", "CNN", OURS)


def load(file: Path) -> Images:
    """Loads all photos, with the number of the person as label."""
    from scipy.io import loadmat  # the table does not need it

    pixels = torch.from_numpy(loadmat(file)["DATA"].T.astype("float32")) / 255
    if pixels.shape != (PEOPLE * PHOTOS, SHAPE[0] * SHAPE[1]):
        raise ValueError(f"expected {PEOPLE * PHOTOS} photos of {SHAPE} pixels in {file}, got {tuple(pixels.shape)}")
    rows = pixels.unflatten(-1, SHAPE[::-1]).mT.flatten(1)  # columns first in the file
    return Images(rows, torch.arange(PEOPLE).repeat_interleave(PHOTOS), SHAPE)


def select(images: Images, numbers: Sequence[int]) -> Images:
    """Returns the photos with these numbers, from 1 on, of each person."""
    chosen = torch.tensor(list(numbers)) - 1 + PHOTOS * torch.arange(PEOPLE)[:, None]
    return images.subset(chosen.flatten().to(images.rows.device))


def measure(file: Path, device: torch.device, results: ResultTable, seeds: int, methods: Sequence[str]) -> list[Row]:
    """Measures what is missing, prints a line for each training, and returns the rows."""
    images = load(file).to(device)
    damage = Covered(COVERED, *SHAPE)
    for protocol, (stored, asked) in PROTOCOLS.items():
        gallery = select(images, stored)
        for method in methods:
            for seed in range(seeds if method in SEEDED else 1):
                keys = [{"protocol": protocol, "method": method, "seed": seed, "column": column} for column in asked]
                if all(results.has(key) for key in keys):
                    continue
                start = clock(device)
                classify = METHODS[method](gallery, damage.bind(gallery.rows), seed)
                fit = clock(device) - start
                for key, numbers in zip(keys, asked.values(), strict=True):
                    query, start = select(images, numbers), clock(device)
                    accuracy = (classify(query.rows).label == query.labels).double().mean().item()
                    times = {"fit_s": f"{fit:.3g}", "query_s": f"{clock(device) - start:.3g}"}
                    results.add({**key, "queries": len(query.labels), "accuracy": f"{accuracy:.4f}", **times})
                print(f"{protocol}, {method}, seed {seed}: fit {fit:.1f} s", flush=True)
    return results.own_rows


def accuracy_table(rows: Sequence[Row]) -> str:
    """Accuracy in each column of both protocols, with the published rows: mean and deviation over seeds."""
    parts = []
    for protocol, (stored, asked) in PROTOCOLS.items():
        cells = group([row for row in rows if row["protocol"] == protocol], "method", "column")
        body = [[name, *(f"{value:.3f}" for value in values)] for name, values in PUBLISHED[protocol].items()]
        for method in dict.fromkeys(method for method, _ in cells):
            found = [[float(row["accuracy"]) for row in cells.get((method, column), [])] for column in asked]
            if all(found):
                body.append([method, *map(spread, found)])
        marked = bold_best_in_columns(body, dict.fromkeys(range(1, 1 + len(asked)), max))
        numbers = ", ".join(map(str, stored))
        parts.append(f"Accuracy on AR, photos {numbers} stored.\n\n{table(['method', *asked], marked)}")
    return "\n\n".join(parts)
