"""Damaged inputs of a trained network: a memory that repairs them against networks that are trained with the damage.

To run: python -m benchmarks.repair [--sets digits faces16] [--kinds uniform missing] [--splits 5] [--device cuda]

A network is trained on clean rows and not touched again. Its accuracy is measured on damaged test rows as they are
("frozen"), with unknown values filled by the mean, and after ``memory.repair`` ("repaired"), where the memory of the
training rows was fitted once, without arguments. The rivals are trained once for each kind of damage, over all levels,
and the state with the smallest validation loss is kept: a network of the same size and one of twice the width
("retrained", "wide"), a denoising autoencoder before the frozen network ("autoencoder"), and for images a
convolutional network ("cnn"). A median filter ("median"), the label of the nearest stored row ("nearest"), imputation
of missing values by scikit-learn ("k-nearest", "iterative", "trees", in the first split) and the memory with known
positions ("known") complete the table. Networks of all splits and kinds are trained at once.
"""

import copy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.nn import functional

import ahop_layers as ah
from benchmarks import wifi
from benchmarks.harness.command import add_data_dir, explain_missing_data, make_parser
from benchmarks.harness.report import table
from benchmarks.harness.rows import RESULTS, ResultTable, Row
from benchmarks.paper.tabular import data as tabular
from benchmarks.robust.tasks import images

V = ah.variants
NETWORKS = ("retrained", "wide", "autoencoder", "cnn")
SPLITS_TRAINED = 3  # splits for which rivals are trained
LEVELS = {"uniform": (0.0, 0.3, 0.5, 0.7, 0.8), "swapped": (0.3, 0.5, 0.7), "missing": (0.3, 0.6)}
OTHER_LEVELS = (0.3, 0.6)
KINDS = ("uniform", "swapped", "stuck", "saturated", "spikes", "drift", "faults", "covered", "missing")
IMAGES = {"digits": (8, 8), "faces16": (16, 16), "faces32": (32, 32), "mnist1k": (28, 28), "mnist8k": (28, 28)}
IMAGES["mnist60k"] = (28, 28)
FLOORS = tuple(f"wifi-{name}" for name in ("TUT1", "TUT3", "TUT4", "TUT5", "TUT6", "TUT7", "UJI1"))
SETS = (*IMAGES, "adult", "sensors", *FLOORS)
COUNTS = {"mnist1k": 1000, "mnist8k": 8000, "mnist60k": 60_000, "faces16": 1600, "faces32": 1600, "adult": 4000}
ASKED = 1000  # most test rows
STEPS, BATCH, POOL, CHECK = (
    3000,
    256,
    20,
    250,
)  # training steps, batch, steps of a drawn pool, steps between validations
WIDTH = 512


class Split(NamedTuple):
    """Stored and test rows with their classes."""

    stored: Tensor
    labels: Tensor
    asked: Tensor
    target: Tensor


def load(name: str, folder: Path, seed: int) -> Split:
    """Draws a split of a data set; without a published size, two thirds are stored."""
    generator = torch.Generator().manual_seed(seed)
    if name == "digits":
        from sklearn.datasets import load_digits

        rows, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
        rows = rows.float() / 16
    elif name in IMAGES:
        rows, labels = images("mnist" if name.startswith("mnist") else name, folder)
        if name == "mnist60k":
            from benchmarks.images import mnist

            published = mnist(folder)
            rows, labels = (torch.cat([getattr(p, k) for p in published[:2]]) for k in ("images", "labels"))
            rows = rows.flatten(1) / 255
    elif name == "adult":
        cells, over, _ = tabular.adult(folder / "tabular" / "adult.data.xz", folder / "tabular" / "adult.test.xz")
        values, categories = tabular.encode(list(zip(*cells, strict=True)))
        rows, labels = torch.tensor(values[:, ~categories]).float(), torch.tensor(over).long()
    elif name == "sensors":
        hidden = torch.randn(3000, 12, generator=generator) @ torch.randn(12, 48, generator=generator) / 12**0.5
        own = hidden + 0.5 * torch.randn(3000, 48, generator=generator)
        labels = (own @ torch.randn(48, 6, generator=generator)).argmax(1)
        units, means = 10 ** (6 * torch.rand(48, generator=generator) - 3), torch.randn(48, generator=generator)
        rows = (own + 3 * means) * units
    else:
        read = wifi.loadmat(folder / "wifi" / f"{name.removeprefix('wifi-')}.mat")["database"][0, 0]
        signals, places = (
            np.concatenate([read[f"{part}{kind}"] for part in ("training", "test")]) for kind in ("Macs", "Labels")
        )
        rows = torch.tensor(np.where(signals == wifi.NOT_HEARD, -110.0, signals)).float()
        labels = torch.tensor(np.unique(places[:, 3], return_inverse=True)[1])
    order = torch.randperm(len(rows), generator=generator)
    count = COUNTS.get(name, min(2000, len(rows) * 2 // 3))
    stored, asked = order[:count], order[count : count + ASKED]
    return Split(rows[stored], labels[stored], rows[asked], labels[asked])


class Stuck(V.Variant):
    """Gives a share of the values one constant of their column, the value of a random pattern."""

    def __init__(self, share: Any, constants: Tensor) -> None:
        self.share, self.constants = share, constants

    def __call__(self, origin: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Damages each row."""
        return torch.where(V.Missing(self.share)(origin, generator).isnan(), self.constants, origin)


class Group(V.Variant):
    """Multiplies the differences of a group of adjacent columns from their mean by one gain of each row."""

    def __init__(self, share: Any, mean: Tensor) -> None:
        self.share, self.mean = share, mean

    def __call__(self, origin: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Damages each row."""
        draw = torch.rand(3, len(origin), 1, generator=generator, device=origin.device)
        low, high = self.share if isinstance(self.share, tuple) else (self.share, self.share)
        place = torch.arange(origin.shape[1], device=origin.device) / origin.shape[1]
        inside = (place - draw[0]) % 1 < low + (high - low) * draw[1]
        return torch.where(inside, self.mean + (origin - self.mean) * 2 ** (4 * draw[2] - 2), origin)


class Faults(V.Variant):
    """Makes sensors stuck, saturated, spiking or missing, a quarter each."""

    def __init__(self, share: Any, parts: Sequence[V.Variant]) -> None:
        self.share, self.parts = share, parts

    def __call__(self, origin: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Damages each row."""
        wrong = V.Missing(self.share)(origin, generator).isnan()
        kind = torch.randint(len(self.parts), origin.shape, generator=generator, device=origin.device)
        found = origin
        for number, part in enumerate(self.parts):
            found = torch.where(wrong & (kind == number), part(origin, generator), found)
        return found


def damage(kind: str, share: Any, stored: Tensor, shape: tuple[int, int] | None) -> V.Variant:
    """Returns a kind of damage at a level, or over a range of levels."""
    generator = torch.Generator(stored.device).manual_seed(1)
    constants = stored.gather(
        0, torch.randint(len(stored), stored[:1].shape, generator=generator, device=stored.device)
    )
    plain: dict[str, Any] = {"uniform": V.Replaced, "swapped": V.Swapped, "saturated": V.Saturated}
    plain |= {"spikes": V.Spiked, "missing": V.Missing}
    if kind in plain:
        return plain[kind](share).bind(stored)
    if kind == "faults":
        parts = [Stuck(1.0, constants), *(plain[each](1.0).bind(stored) for each in ("saturated", "spikes", "missing"))]
        return Faults(share, parts)
    if kind == "covered":
        return V.Covered(share, *(shape or ())).bind(stored)
    return Stuck(share, constants) if kind == "stuck" else Group(share, stored.mean(0))


class Classifier(nn.Sequential):
    """Two hidden layers."""

    def __init__(self, dim: int, classes: int, width: int = WIDTH) -> None:
        layers = [nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)]
        super().__init__(*layers)


class Convolutional(nn.Sequential):
    """Three convolutions with pooling between them."""

    def __init__(self, shape: tuple[int, int], classes: int) -> None:
        layers: list[nn.Module] = [nn.Unflatten(-1, (1, *shape))]
        for before, after in ((1, 32), (32, 64), (64, 64)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        size = 64 * (shape[0] // 8) * (shape[1] // 8)
        super().__init__(*layers, nn.Flatten(), nn.Linear(size, 128), nn.ReLU(), nn.Linear(128, classes))


class Ensemble:
    """Networks of one shape that are trained at once, each on its own rows ``(networks, n, d)``."""

    def __init__(self, make: Callable[[], nn.Module], count: int, device: torch.device) -> None:
        networks = [make().to(device) for _ in range(count)]
        self.base = copy.deepcopy(networks[0]).to("meta")
        self.weights, _ = stack_module_state(networks)  # type: ignore[arg-type]

    def __call__(self, x: Tensor) -> Tensor:
        """Applies each network to its rows."""
        return torch.vmap(lambda weights, rows: functional_call(self.base, weights, (rows,)))(self.weights, x)

    def train(
        self, draw: Callable[[int], tuple[Tensor, Tensor]], held: tuple[Tensor, Tensor], steps: int
    ) -> "Ensemble":
        """Trains with AdamW and keeps the state of each network with the smallest validation loss."""
        parameters = list(self.weights.values())
        optimizer = torch.optim.AdamW(parameters, 1e-3, weight_decay=0.02, fused=parameters[0].is_cuda)
        best = held[0].new_full((len(held[0]),), torch.inf)
        kept = {name: each.detach().clone() for name, each in self.weights.items()}
        for step in range(steps):
            if step % POOL == 0:
                x, y = draw(POOL * BATCH)
            part = slice(BATCH * (step % POOL), BATCH * (step % POOL + 1))
            self.loss(x[:, part], y[:, part]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % CHECK == CHECK - 1:
                with torch.no_grad():
                    loss = self.loss(*held)
                    for name, each in self.weights.items():
                        better = (loss < best).reshape(-1, *[1] * (each.ndim - 1))
                        kept[name] = torch.where(better, each, kept[name]).detach()
                    best = best.minimum(loss)
        self.weights = kept
        return self

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the mean loss of each network: cross-entropy for classes, squared error for rows."""
        found = self(x)
        if y.is_floating_point():
            return (found - y).square().mean((1, 2))
        return functional.cross_entropy(found.movedim(-1, 1), y, reduction="none").mean(1)


class Trainer:
    """The rows of all splits of a data set, standardized for networks."""

    def __init__(self, splits: Sequence[Split], name: str, steps: int, device: torch.device) -> None:
        self.splits, self.shape, self.steps, self.device = splits, IMAGES.get(name), steps, device
        self.classes = 1 + max(int(split.labels.max()) for split in splits)
        self.center = [split.stored.mean(0) for split in splits]
        self.scale = [split.stored.std(0) + (split.stored.std(0) == 0) for split in splits]
        self.generator = torch.Generator(device).manual_seed(0)

    def standard(self, rows: Tensor, split: int) -> Tensor:
        """Returns rows as networks read them: standardized, limited to 30 deviations, unknown values 0."""
        return ((rows - self.center[split]) / self.scale[split]).clamp(-30, 30).nan_to_num(0.0)

    def rows(self, kinds: Sequence[str | None], count: int, own: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Draws damaged rows of each kind and split, their classes, and the clean rows."""
        damaged, classes, clean = [], [], []
        for kind in kinds:
            for number, split in enumerate(self.splits):
                stored, labels = split.stored[own], split.labels[own]
                index = torch.randint(len(stored), (count,), generator=self.generator, device=self.device)
                intact = stored[index]
                variant = None if kind is None else damage(kind, (0.0, 0.9), split.stored, self.shape)
                damaged.append(self.standard(intact if variant is None else variant(intact, self.generator), number))
                clean.append(self.standard(intact, number))
                classes.append(labels[index])
        return torch.stack(damaged), torch.stack(classes), torch.stack(clean)

    def train(self, make: Callable[[], nn.Module], kinds: Sequence[str | None], to: int = 1) -> Ensemble:
        """Trains a network for each kind and split, which are ordered in this way. ``to`` 2 reconstructs rows."""
        last = len(self.splits[0].stored) // 10
        held = self.rows(kinds, min(2 * last, 512), slice(-last, None))

        def draw(count: int) -> tuple[Tensor, Tensor]:
            found = self.rows(kinds, count, slice(None, -last))
            return found[0], found[to]

        return Ensemble(make, len(kinds) * len(self.splits), self.device).train(draw, (held[0], held[to]), self.steps)


def median(rows: Tensor, shape: tuple[int, int]) -> Tensor:
    """Applies a median filter of 3 x 3 pixels, which ignores unknown ones."""
    padded = functional.pad(rows.reshape(-1, 1, *shape), (1, 1, 1, 1), mode="replicate")
    found = padded.unfold(2, 3, 1).unfold(3, 3, 1).flatten(-2).nanmedian(-1).values
    return found.flatten(1).nan_to_num(0.0)


def imputed(stored: Tensor, query: Tensor) -> dict[str, Tensor]:
    """Fills unknown values by scikit-learn."""
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer, KNNImputer

    found = {}
    imputers = {"k-nearest": KNNImputer(weights="distance"), "iterative": IterativeImputer(max_iter=5)}
    if stored.shape[1] <= 16:
        imputers["trees"] = IterativeImputer(HistGradientBoostingRegressor(max_iter=50), max_iter=2)
    scale = stored.std(0) + (stored.std(0) == 0)
    for name, imputer in imputers.items():
        if name == "k-nearest" or stored.shape[1] <= 64:
            values = imputer.fit((stored / scale).cpu().numpy()).transform((query / scale).cpu().numpy())
            found[name] = torch.as_tensor(values, dtype=stored.dtype, device=stored.device) * scale
    return found


def calibration_error(intact: Tensor, right: Tensor) -> float:
    """Returns the mean difference of probability and frequency over ten bins."""
    bins = (intact * 10).long().clamp(0, 9)
    count = torch.bincount(bins, minlength=10).double()
    difference = torch.bincount(bins, intact.double(), 10) - torch.bincount(bins, right.double(), 10)
    return (difference.abs().sum() / count.sum()).item()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the missing splits and prints the tables."""
    parser = make_parser("repair", __doc__)
    add = parser.add_argument
    add("--sets", nargs="+", choices=SETS, default=["digits"], help="data sets (default: digits)")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of damage (default: all)")
    add("--splits", type=int, default=5, help="number of random splits (default: %(default)s)")
    add("--rivals", type=int, default=SPLITS_TRAINED, help="splits with trained rivals (default: %(default)s)")
    add("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="trained rivals (default: all)")
    add("--steps", type=int, default=STEPS, help="training steps of networks (default: %(default)s)")
    add("--as-rows", action="store_true", help="store images as rows")
    add("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    add("--output", type=Path, default=RESULTS / "repair.csv", help="CSV file (default: %(default)s)")
    add_data_dir(parser, "faces/yale_b.npz, mnist, tabular and wifi")
    options = parser.parse_args(arguments)
    results, device = ResultTable(options.output, options.device), torch.device(options.device)
    for name in options.sets:
        last = {"data": name, "as_rows": int(options.as_rows), "split": options.splits - 1}
        if all(results.has(last | {"kind": kind}) for kind in kinds_of(name, options.kinds)):
            continue
        began = time.perf_counter()
        with explain_missing_data():
            loaded = [load(name, options.data_dir, seed) for seed in range(options.splits)]
        splits = [Split(*(each.to(device) for each in split)) for split in loaded]
        measure(name, splits, options, results)
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
    print(report(results.own_rows))


def kinds_of(name: str, kinds: Sequence[str]) -> list[str]:
    """Returns the kinds of damage that a data set can have."""
    return [kind for kind in kinds if (kind != "covered" or name in IMAGES) and (kind != "faults" or name == "sensors")]


def measure(name: str, splits: Sequence[Split], options: Any, results: ResultTable) -> None:
    """Measures all kinds of damage of one data set."""
    shape, device = IMAGES.get(name), splits[0].stored.device
    kinds = kinds_of(name, options.kinds)
    torch.manual_seed(0)
    everyone = Trainer(splits, name, options.steps, device)
    dim, classes = splits[0].stored.shape[1], everyone.classes
    frozen = everyone.train(lambda: Classifier(dim, classes), [None])
    rivals: dict[str, Ensemble] = {}
    if options.rivals:
        few = Trainer(splits[: options.rivals], name, options.steps, device)
        made: dict[str, Callable[[], nn.Module]] = {
            "retrained": lambda: Classifier(dim, classes),
            "wide": lambda: Classifier(dim, classes, 2 * WIDTH),
            "autoencoder": lambda: Classifier(dim, dim),
            "cnn": lambda: Convolutional(shape, classes),
        }
        for rival in options.networks if shape else [each for each in options.networks if each != "cnn"]:
            rivals[rival] = few.train(made[rival], kinds, to=2 if rival == "autoencoder" else 1)
    for number, split in enumerate(splits):
        rows = split.stored if shape is None or options.as_rows else split.stored.reshape(-1, *shape)
        memory = ah.AssociativeMemory(rows)
        began = time.perf_counter()
        said = memory.fit(seed=number).repair
        key: dict[str, Any] = {"data": name, "as_rows": int(options.as_rows), "split": number}
        print(f"{name}, split {number}: fitted in {time.perf_counter() - began:.1f} s; {said}", flush=True)
        for at, kind in enumerate(kinds):
            for level in LEVELS.get(kind, OTHER_LEVELS):
                cell = key | {"kind": kind, "level": level}
                if results.has(cell):
                    continue
                generator = torch.Generator(device).manual_seed(1000 * number + round(100 * level))
                query = damage(kind, level, split.stored, shape)(split.asked, generator)
                query[:, 0] = torch.where(query.isnan().all(1), split.asked[:, 0], query[:, 0])
                inputs, extra = answers(memory, split, query, shape, impute=kind == "missing" and number == 0)
                ready = {method: everyone.standard(each, number) for method, each in inputs.items()}
                found = {method: accuracy_of(frozen, number, each, split.target) for method, each in ready.items()}
                for rival, network in rivals.items() if number < options.rivals else ():
                    place, given = at * options.rivals + number, ready["frozen"]
                    if rival == "autoencoder":
                        cleaned = apply(network, place, given)
                        found[rival] = accuracy_of(frozen, number, cleaned, split.target)
                    else:
                        found[rival] = accuracy_of(network, place, given, split.target)
                nearest = split.labels[memory.search(query).indices[:, 0]]
                found["nearest"] = (nearest == split.target).double().mean().item()
                results.add_figures(cell, {f"accuracy {method}": value for method, value in found.items()} | extra)


def answers(
    memory: ah.AssociativeMemory, split: Split, query: Tensor, shape: tuple[int, int] | None, impute: bool
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Returns damaged rows after each treatment, and figures of the repair."""
    began = time.perf_counter()
    values, intact = memory.repair(query)
    values.sum().item()
    seconds = time.perf_counter() - began
    wrong, known = (query != split.asked) & ~query.isnan(), ~query.isnan()
    inputs = {"frozen": query, "repaired": values}
    inputs["known"] = memory.repair(
        query.masked_fill(wrong & (wrong.sum(1) < wrong.shape[1])[:, None], torch.nan)
    ).values
    if shape:
        inputs["median"] = median(query, shape)
    if impute:
        inputs |= imputed(split.stored[:2000], query)
    suspicious = (intact < 0.5) & known
    both = (suspicious & wrong).sum().item()
    extra = {
        "changed": ((values != query) & known).any(1).double().mean().item(),
        "precision": both / max(1, suspicious.sum().item()),
        "recall": both / max(1, wrong.sum().item()),
        "calibration error": calibration_error(intact[known], ~wrong[known]),
        "seconds": seconds,
    }
    return inputs, extra


def apply(network: Ensemble, place: int, x: Tensor) -> Tensor:
    """Applies one network of an ensemble."""
    with torch.no_grad():
        return functional_call(network.base, {name: each[place] for name, each in network.weights.items()}, (x,))


def accuracy_of(network: Ensemble, place: int, x: Tensor, target: Tensor) -> float:
    """Returns the accuracy of one network of an ensemble."""
    return (apply(network, place, x).argmax(-1) == target).double().mean().item()


def report(rows: Sequence[Row]) -> str:
    """Returns a table of means over the splits for each data set: kinds and levels, and what was measured."""
    lines = []
    for name in dict.fromkeys((row["data"], row["as_rows"]) for row in rows):
        own = [row for row in rows if (row["data"], row["as_rows"]) == name]
        measures = list(dict.fromkeys(row["measure"] for row in own))
        cells: dict[tuple[str, str], dict[str, list[float]]] = {}
        for row in own:
            cell = cells.setdefault((row["kind"], row["level"]), {})
            cell.setdefault(row["measure"], []).append(float(row["value"]))
        body = [
            [*at, *(f"{np.mean(cell[each]):.3f}" if each in cell else "" for each in measures)]
            for at, cell in cells.items()
        ]
        header = ["kind", "level", *(each.removeprefix("accuracy ") for each in measures)]
        lines.append(f"\n{name[0]}{', as rows' if name[1] == '1' else ''}\n\n{table(header, body)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
