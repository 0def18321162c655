"""How robust a learned similarity is: accuracy of search with damaged queries against one-line baselines.

To run: python -m benchmarks.robust [--data faces16 digits] [--splits 5] [--device cuda] [--output robust.csv]

One fit covers the whole range of damage. Every baseline has one parameter for the whole range, chosen on damaged stored
patterns. Values of images are replaced by uniform ones with probability 0 to 0.9; embeddings are those of
``benchmarks.pairs``; up to 60 % of the sensors of a table are stuck at the value of another row, spike by 3 to 10
deviations, or are missing, and all have noise of a tenth of their deviation. Faces and MNIST are classified by the best
of the stored images (1,000 faces, 1,207 digits); of the others, the pattern itself is to be found. Baselines see each
sensor divided by its deviation, and compare known values only; the memory, with default arguments, sees the raw values.
"""

import gzip
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

import ahop_layers as ah
from ahop_layers.memory import questions
from ahop_layers.memory.auto import AutoSimilarity
from ahop_layers.memory.solve import learn
from ahop_layers.variants import as_damage
from benchmarks import pairs
from benchmarks.harness.command import add_data_dir, explain_missing_data, make_parser
from benchmarks.harness.report import bold_best_in_columns, group, table
from benchmarks.harness.rows import RESULTS, ResultTable, Row
from benchmarks.search.data import IDX, IDX_FILES

Damage = Callable[[Tensor, Tensor, torch.Generator], Tensor]
"""Damages patterns ``(n, d)`` at levels ``(n, 1)``."""

SETS = ("faces16", "faces32", "mnist", "digits", "embeddings", "sensors")
LEVELS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
QUANTILES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
CHOICE_QUERIES = 512
BLOCK = {"cpu": 2**20}


class Task(NamedTuple):
    """Stored patterns, their classes, intact queries and what they belong to, the damage, and units for baselines."""

    stored: Tensor
    labels: Tensor | None
    asked: Tensor
    target: Tensor
    damage: Damage
    levels: Sequence[float]
    highest: float
    unit: Tensor = torch.ones(())

    def to(self, device: torch.device) -> "Task":
        """Moves all tensors to a device."""
        return self._replace(**{key: x.to(device) for key, x in self._asdict().items() if isinstance(x, Tensor)})

    def draw(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Damages each pattern at a random level of the range."""
        level = torch.rand(len(x), 1, generator=generator, device=x.device) * self.highest
        return self.damage(x, level, generator)

    def accuracy(self, index: Tensor) -> float:
        """Returns the fraction of queries whose class, or pattern, is that of the stored pattern ``index``."""
        found = index if self.labels is None else self.labels[index]
        return (found == self.target).double().mean().item()


def replace(low: Tensor, high: Tensor) -> Damage:
    """Replaces values by uniform ones between ``low`` and ``high``; the level is the probability."""

    def damage(x: Tensor, level: Tensor, generator: torch.Generator) -> Tensor:
        wrong, values = torch.rand(2, *x.shape, generator=generator, device=x.device)
        return torch.where(wrong < level, low.to(x) + (high - low).to(x) * values, x)

    return damage


def break_sensors(stored: Tensor) -> Damage:
    """Adds noise, and makes sensors stuck, spiking or missing; the level is the fraction of these."""

    def damage(x: Tensor, level: Tensor, generator: torch.Generator) -> Tensor:
        values, deviation = stored.to(x), stored.std(0).to(x)
        wrong, kind, size = torch.rand(3, *x.shape, generator=generator, device=x.device)
        noise = torch.empty_like(x).normal_(generator=generator)
        row = torch.randint(len(values), x.shape, generator=generator, device=x.device)
        other = values.gather(0, row)
        spike = x + (3 + 7 * size) * deviation * torch.sign(noise)
        fault = torch.where(kind < 1 / 3, other, torch.where(kind < 2 / 3, spike, torch.nan))
        return torch.where(wrong < level, fault, x + 0.1 * deviation * noise)

    return damage


def images(name: str, folder: Path) -> tuple[Tensor, Tensor]:
    """Loads faces of 16 x 16 or 32 x 32 pixels, or MNIST."""
    if name == "mnist":
        pixels, labels = (gzip.decompress((folder / IDX["digits"] / file).read_bytes()) for file in IDX_FILES)
        rows = np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, 784)
        return torch.from_numpy(rows / np.float32(255)), torch.from_numpy(
            np.frombuffer(labels, np.uint8, offset=8).astype(np.int64)
        )
    with np.load(folder / "faces" / "yale_b.npz") as arrays:
        faces, people = arrays["images"] / np.float32(255), arrays["labels"].astype(np.int64)
    side = int(name.removeprefix("faces"))
    cells = torch.from_numpy(faces).reshape(-1, side, 32 // side, side, 32 // side)
    return cells.mean((2, 4)).flatten(1), torch.from_numpy(people)


def make_task(name: str, folder: Path, generator: torch.Generator) -> Task:
    """Draws a split of a data set."""
    if name in ("faces16", "faces32", "mnist"):
        rows, labels = images(name, folder)
        order = torch.randperm(len(rows), generator=generator)
        stored, asked = (order[:1207], order[1207:2414]) if name == "mnist" else (order[:1000], order[1000:1600])
        unit = replace(torch.zeros(()), torch.ones(()))
        return Task(rows[stored], labels[stored], rows[asked], labels[asked], unit, LEVELS, 0.9)
    if name == "digits":
        from sklearn.datasets import load_digits

        rows = torch.from_numpy(load_digits().data.astype(np.float32) / 16)
        return Task(rows, None, rows, torch.arange(len(rows)), replace(rows.amin(0), rows.amax(0)), LEVELS, 0.9)
    if name == "embeddings":
        rows = normalize(torch.randn(pairs.PATTERNS, pairs.DIM, generator=generator), dim=-1)
        target = torch.randint(len(rows), (pairs.QUERIES,), generator=generator)
        return Task(rows, None, rows[target], target, lambda x, level, g: pairs.damage(x, g), (0.7,), 0.7)
    hidden = torch.randn(800, 12, generator=generator) @ torch.randn(12, 48, generator=generator) / 12**0.5
    own = hidden + 0.5 * torch.randn(800, 48, generator=generator)
    units, means = 10 ** (6 * torch.rand(48, generator=generator) - 3), torch.randn(48, generator=generator)
    rows = (own + 3 * means) * units
    return Task(rows, None, rows, torch.arange(800), break_sensors(rows), (0.0, 0.2, 0.4, 0.6), 0.6, rows.std(0))


def distances(query: Tensor, stored: Tensor, clips: Tensor) -> dict[str, Tensor]:
    """Scores of all baselines and parameters, larger is better: by name ``(parameters, L, N)``."""
    parts: dict[str, list[Tensor]] = {}
    shares = torch.tensor(SHARES, device=query.device)
    for part in query.split(max(1, BLOCK.get(query.device.type, 2**27) // stored.numel())):
        difference = (part[:, None] - stored).abs()
        known = (~difference.isnan()).float().mean(-1).clamp(min=1e-9)
        kept = (difference.nan_to_num(torch.inf).sort(-1).values, known * difference.shape[-1])
        total = torch.nn.functional.pad(kept[0].nan_to_num(posinf=0.0).cumsum(-1), (1, 0))
        place = (shares[:, None, None] * kept[1]).round().long().clamp(min=1)
        scores = {
            "L1": -difference.nansum(-1)[None] / known,
            "Euclid": -difference.square().nansum(-1)[None] / known,
            "clipped L1": torch.stack([-difference.clamp(max=clip).nansum(-1) / known for clip in clips]),
            "trimmed L1": -torch.stack([total.gather(-1, at[..., None])[..., 0] for at in place]) / known,
            "exp(-d/w)": torch.stack([(difference / -clip).exp().nansum(-1) / known for clip in clips]),
        }
        first, second = (x.nan_to_num(0.0) for x in (part, stored))
        scores["cosine"] = (normalize(first, dim=-1) @ normalize(second, dim=-1).mT)[None]
        for name, score in scores.items():
            parts.setdefault(name, []).append(score)
    return {name: torch.cat(each, 1) for name, each in parts.items()}


def learn_without_ranks(memory: ah.AssociativeMemory, task: Task, seed: int) -> None:
    """Fits a memory with weights of the bases that do not depend on ranks."""
    generator = torch.Generator(task.stored.device).manual_seed(seed)
    asked = questions.draw(as_damage(task.draw), task.stored, task.labels, generator)
    learned = learn(task.stored, task.labels, asked, generator, bins=1)
    cast(AutoSimilarity, memory.similarity).set_(learned)


def measure(task: Task, generator: torch.Generator, seed: int) -> dict[str, dict[float, float]]:
    """Returns the accuracy of each method at each level, and the seconds of the fit as the level -1."""
    asked = {}
    for level in task.levels:
        levels = torch.full((len(task.asked), 1), level).to(task.asked)
        asked[level] = task.damage(task.asked, levels, generator)
    memory = ah.AssociativeMemory(task.stored, labels=task.labels)
    found = {"not fitted": {level: task.accuracy(memory.recall(query)) for level, query in asked.items()}}
    began = time.perf_counter()
    memory.fit(task.draw, seed=seed)
    if task.stored.is_cuda:
        torch.cuda.synchronize()
    found["fitted"] = {-1.0: time.perf_counter() - began}
    found["fitted"] |= {level: task.accuracy(memory.recall(query)) for level, query in asked.items()}
    if task.labels is not None:
        found["fitted, by class"] = {
            level: (memory.classify(query) == task.target).double().mean().item() for level, query in asked.items()
        }
    learn_without_ranks(memory, task, seed)
    found["fitted, not sorted"] = {level: task.accuracy(memory.recall(query)) for level, query in asked.items()}

    scaled = task.stored / task.unit
    first, second = torch.randint(len(scaled), (2, 256), generator=generator, device=scaled.device)
    apart = (scaled[first] - scaled[second]).abs().flatten()
    apart = apart[apart > 0][:100_000]
    clips = torch.cat([apart.quantile(torch.tensor(QUANTILES).to(apart)), apart.quantile(0.02)[None] / 4])

    # Parameters: damaged copies of stored patterns, which do not answer for themselves where classes are to be found.
    index = torch.randint(len(scaled), (CHOICE_QUERIES,), generator=generator, device=scaled.device)
    scores = distances(task.draw(task.stored[index], generator) / task.unit, scaled, clips)
    best = {}
    for name, each in scores.items():
        if task.labels is not None:
            each[:, torch.arange(len(index)), index] = -torch.inf
        right = each.argmax(-1) == index if task.labels is None else task.labels[each.argmax(-1)] == task.labels[index]
        best[name] = int(right.double().mean(-1).argmax())
    for level, query in asked.items():
        for name, each in distances(query / task.unit, scaled, clips).items():
            found.setdefault(name, {})[level] = task.accuracy(each[best[name]].argmax(-1))
    return found


NAMES = {
    "faces16": "faces of 16 x 16 pixels, person",
    "faces32": "faces of 32 x 32 pixels, person",
    "mnist": "MNIST digits, class",
    "digits": "scikit-learn's digits, pattern",
    "embeddings": "unit-norm embeddings, 70 % erased, pattern",
    "sensors": "48 sensors in different units, pattern",
}
"""Data set -> what it is, and what is to be found."""

METHODS = ("cosine", "Euclid", "L1", "clipped L1", "trimmed L1", "exp(-d/w)", "not fitted", "fitted, not sorted",
           "fitted", "fitted, by class")  # fmt: skip


def report(rows: Sequence[Row]) -> str:
    """Mean accuracy over the splits: for each data set a table with a line for each method."""
    texts = []
    for (name,), here in group(rows, "data").items():
        levels = sorted({float(row["level"]) for row in here if float(row["level"]) >= 0})
        own = {method: mine for (method,), mine in group(here, "method").items()}
        body = []
        for method in (each for each in METHODS if each in own):
            cells = [
                mean(float(row["value"]) for row in own[method] if float(row["level"]) == level) for level in levels
            ]
            body.append([method, *(f"{cell:.3f}" for cell in cells)])
        seconds = mean(float(row["value"]) for row in here if float(row["level"]) < 0)
        splits = len({row["split"] for row in here})
        body = bold_best_in_columns(body, dict.fromkeys(range(1, len(levels) + 1), max))
        title = NAMES[name][:1].upper() + NAMES[name][1:]
        title += f": accuracy by the level of damage, {splits} splits; fitted in {seconds:.1f} s."
        texts.append(title + "\n\n" + table(["level", *levels], body))
    return "\n\n".join(texts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the missing splits and prints the tables."""
    parser = make_parser("robust", __doc__)
    add = parser.add_argument
    add("--data", nargs="+", choices=SETS, default=SETS, help="data sets (default: all)")
    add("--splits", type=int, default=5, help="number of random splits (default: %(default)s)")
    add("--queries", type=int, help="use only so many queries per level (default: all)")
    add("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    add("--output", type=Path, default=RESULTS / "robust.csv", help="CSV file (default: %(default)s)")
    add_data_dir(parser, "faces/yale_b.npz and mnist")
    options = parser.parse_args(arguments)
    results, device = ResultTable(options.output, options.device), torch.device(options.device)
    for name in options.data:
        for split in range(options.splits):
            if results.has({"data": name, "split": split}):
                continue
            with explain_missing_data():
                task = make_task(name, options.data_dir, torch.Generator().manual_seed(split))
            task = task._replace(asked=task.asked[: options.queries], target=task.target[: options.queries]).to(device)
            found = measure(task, torch.Generator(device).manual_seed(split), split)
            results.add(
                *(
                    {"data": name, "split": split, "method": method, "level": level, "value": f"{value:.4f}"}
                    for method, values in found.items()
                    for level, value in values.items()
                )
            )
    print(report(results.own_rows))


if __name__ == "__main__":
    main()
