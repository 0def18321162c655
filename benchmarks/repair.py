"""Damaged inputs of a trained network: a memory that repairs them against networks that are trained with the damage.

To run: python -m benchmarks.repair [--sets digits faces16] [--kinds uniform missing] [--splits 5] [--device cuda]

A network is trained on clean rows and not touched again. Its accuracy is measured on damaged test rows as they are
("frozen"), with unknown values filled by the mean, and after ``memory.repair`` ("repaired"), where the memory of the
training rows, whose labels are the network's own answers, was fitted once, without arguments. The rivals are trained
once for each kind of damage, over all levels, until their validation loss stops falling, and the state with the
smallest one is kept: a network of the same size and one of twice the width ("retrained", "wide"), a denoising
autoencoder before the frozen network ("autoencoder"), and for images a convolutional network ("cnn"). A median filter
("median"), the label of the nearest stored row ("nearest") and the memory with known positions ("known") complete the
table, and for missing values the mean of the nearest rows ("k-nearest"), as scikit-learn imputes it, and in the first
split, for up to 64 columns, iterative imputation ("iterative") and gradient-boosted trees that were trained with
missing values ("trees"). Networks of all splits and kinds are trained at once. Figures that the output file has are not
measured again.
"""

import copy
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.nn import functional

import ahop_layers as ah
from benchmarks import wifi
from benchmarks.damages import Drifted, Wrong, sensor_faults
from benchmarks.harness.command import add_data_dir, explain_missing_data, make_parser
from benchmarks.harness.report import bold_best, group, table
from benchmarks.harness.rows import RESULTS, ResultTable, Row
from benchmarks.images import mnist
from benchmarks.paper.tabular import data as tabular
from benchmarks.robust.tasks import images

V = ah.variants
NETWORKS = ("retrained", "wide", "autoencoder", "cnn")
KINDS = ("uniform", "swapped", "stuck", "saturated", "spikes", "drift", "faults", "covered", "missing")
LEVELS = {"uniform": (0.0, 0.3, 0.5, 0.7, 0.8), "swapped": (0.3, 0.5, 0.7), "faults": (0.1, 0.3, 0.6)}
OTHER_LEVELS = (0.3, 0.6)
TRAINED = (0.0, 0.9)  # levels with which rivals are trained
IMAGES = {"digits": (8, 8), "faces16": (16, 16), "faces32": (32, 32), "mnist1k": (28, 28), "mnist8k": (28, 28)}
IMAGES["mnist60k"] = (28, 28)
SETS = (*IMAGES, "adult", "sensors", *(f"wifi-{name}" for name in wifi.SETS if name[:3] in ("TUT", "UJI")))
COUNTS = {"mnist1k": 1000, "mnist8k": 8000, "mnist60k": 60_000, "faces16": 1600, "faces32": 1600, "adult": 4000}
STORED, ASKED = 2000, 1000  # most stored rows of other sets, most test rows
BATCH, POOL = 256, 20  # rows of a step, steps of a draw
CHECK, PATIENCE = 250, 4  # steps between validations, validations
SHOWN = ("faces16", "digits", "sensors", "wifi-UJI1")  # sets in the table of all damages of the documentation
OTHERS = ("faces32", "mnist8k", "adult")  # sets in its table of uniform damage
WIDTH, NEIGHBORS, FEW_COLUMNS = 512, 5, 64


class Split(NamedTuple):
    """Stored and test rows with their classes, and what networks subtract and divide by."""

    stored: Tensor
    labels: Tensor
    asked: Tensor
    target: Tensor
    center: Tensor
    scale: Tensor

    def standard(self, rows: Tensor) -> Tensor:
        """Returns rows as networks read them: standardized, limited to 30 deviations, unknown values 0."""
        return ((rows - self.center) / self.scale).clamp(-30, 30).nan_to_num(0.0)


@lru_cache(maxsize=1)
def read(name: str, folder: Path) -> tuple[Tensor, Tensor]:
    """Reads rows and their classes."""
    if name == "digits":
        from sklearn.datasets import load_digits

        pixels, digits = load_digits(return_X_y=True)
        return torch.tensor(pixels).float() / 16, torch.tensor(digits)
    if name == "mnist60k":
        parts = mnist(folder)[:2]
        rows, labels = (torch.cat([getattr(part, each) for part in parts]) for each in ("images", "labels"))
        return rows.flatten(1) / 255, labels
    if name in IMAGES:
        return images("mnist" if name.startswith("mnist") else name, folder)
    if name == "adult":
        cells, over, _ = tabular.adult(folder / "tabular" / "adult.data.xz", folder / "tabular" / "adult.test.xz")
        values, categories = tabular.encode(list(zip(*cells, strict=True)))
        return torch.tensor(values[:, ~categories]).float(), torch.tensor(over).long()
    with (folder / "wifi" / f"{name.removeprefix('wifi-')}.mat").open("rb") as file:
        found = wifi.loadmat(file)["database"][0, 0]
    signals, places = (
        np.concatenate([found[f"{part}{kind}"] for part in ("training", "test")]) for kind in ("Macs", "Labels")
    )
    floors = np.unique(places[:, 3], return_inverse=True)[1]
    return torch.tensor(np.where(signals == wifi.NOT_HEARD, -110.0, signals)).float(), torch.tensor(floors)


def sensors(generator: Generator) -> tuple[Tensor, Tensor]:
    """Draws readings of 48 sensors in different units, and a class that is a function of the readings."""
    hidden = torch.randn(3000, 12, generator=generator) @ torch.randn(12, 48, generator=generator) / 12**0.5
    own = hidden + 0.5 * torch.randn(3000, 48, generator=generator)
    labels = (own @ torch.randn(48, 6, generator=generator)).argmax(1)
    units, means = 10 ** (6 * torch.rand(48, generator=generator) - 3), torch.randn(48, generator=generator)
    return (own + 3 * means) * units, labels


def load(name: str, folder: Path, seed: int, device: torch.device) -> Split:
    """Draws a split of a data set."""
    generator = Generator().manual_seed(seed)
    rows, labels = sensors(generator) if name == "sensors" else read(name, folder)
    order = torch.randperm(len(rows), generator=generator)
    count = COUNTS.get(name, min(STORED, len(rows) * 2 // 3))
    parts = [each[some] for some in (order[:count], order[count : count + ASKED]) for each in (rows, labels)]
    variance = parts[0].var(0)
    if name not in ("adult", "sensors"):  # all columns have one unit
        variance = variance.mean().expand_as(variance)
    scale = variance.sqrt() + (variance == 0)
    return Split(*(each.to(device) for each in (*parts, parts[0].mean(0), scale)))


def damage(kind: str, share: Any, stored: Tensor, shape: tuple[int, int] | None) -> V.Variant:
    """Returns a kind of damage at a level, or over a range of levels."""
    if kind == "uniform":  # within the range of a pixel, or of the column
        return V.Replaced(share, 0.0, 1.0) if shape else V.Replaced(share).bind(stored)
    if kind == "covered":
        return V.Covered(share, *(shape or ())).bind(stored)
    return Drifted(share, stored.mean(0)) if kind == "drift" else Wrong(share, sensor_faults(stored)[kind])


def cells(name: str, kinds: Sequence[str], levels: Sequence[float] | None = None) -> list[tuple[str, float]]:
    """Returns the kinds and levels of damage that a data set has; ``levels`` replace those of every kind."""
    own = [kind for kind in kinds if (kind != "covered" or name in IMAGES) and (kind != "faults" or name == "sensors")]
    return [(kind, level) for kind in own for level in levels or LEVELS.get(kind, OTHER_LEVELS)]


def classifier(dim: int, classes: int, width: int = WIDTH) -> nn.Module:
    """Returns a network of two hidden layers."""
    layers = nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
    return nn.Sequential(*layers)


def convolutional(shape: tuple[int, int], classes: int) -> nn.Module:
    """Returns a network of three convolutions with pooling after each."""
    layers: list[nn.Module] = [nn.Unflatten(-1, (1, *shape))]
    for before, after in ((1, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    size = 64 * (shape[0] // 8) * (shape[1] // 8)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(size, 128), nn.ReLU(), nn.Linear(128, classes))


class Ensemble:
    """Networks of one shape that are trained at once, each on its own rows."""

    def __init__(self, make: Callable[[], nn.Module], count: int, device: torch.device) -> None:
        networks = [make().to(device) for _ in range(count)]
        self.base = copy.deepcopy(networks[0]).to("meta")
        self.weights, _ = stack_module_state(networks)  # type: ignore[arg-type]

    def train(self, draw: Callable[[int], tuple[Tensor, Tensor]], held: tuple[Tensor, Tensor], steps: int) -> None:
        """Trains with AdamW until the losses of held-out rows stop falling, and keeps the best state of each network.

        ``draw`` and ``held`` are inputs ``(networks, n, d)`` and targets ``(networks, n, ...)``.
        """
        parameters = list(self.weights.values())
        optimizer = torch.optim.AdamW(parameters, 1e-3, weight_decay=0.02, fused=parameters[0].is_cuda)
        best = held[0].new_full((len(held[0]),), torch.inf)
        kept = {name: each.detach().clone() for name, each in self.weights.items()}
        history: list[float] = []
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
                        kept[name] = torch.where(better, each, kept[name])
                    best = best.minimum(loss)
                history.append(best.mean().item())
                if len(history) > PATIENCE and history[-1] > 0.99 * history[-1 - PATIENCE]:
                    break
        self.weights = kept

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the mean loss of each network: cross-entropy for classes, squared error for rows."""
        found = torch.vmap(lambda weights, rows: functional_call(self.base, weights, (rows,)))(self.weights, x)
        if y.is_floating_point():
            return (found - y).square().mean((1, 2))
        return functional.cross_entropy(found.movedim(-1, 1), y, reduction="none").mean(1)

    @torch.no_grad()
    def apply(self, number: int, x: Tensor) -> Tensor:
        """Applies one of the networks."""
        return functional_call(self.base, {name: each[number] for name, each in self.weights.items()}, (x,))


def train(
    name: str,
    splits: Sequence[Split],
    kinds: Sequence[str | None],
    steps: int,
    make: Callable[[], nn.Module],
    to_clean: bool = False,
) -> Ensemble:
    """Trains a network for each kind and split, in this order. None is no damage. ``to_clean`` reconstructs rows."""
    device, last = splits[0].stored.device, len(splits[0].stored) // 10
    generator = Generator(device).manual_seed(0)
    pairs = [
        (kind and damage(kind, TRAINED, split.stored, IMAGES.get(name)), split) for kind in kinds for split in splits
    ]

    def draw(count: int, own: slice = slice(None, -last)) -> tuple[Tensor, Tensor]:
        """Draws damaged rows of each kind and split, and their classes or the clean rows."""
        damaged, target = [], []
        for variant, split in pairs:
            index = torch.randint(len(split.stored[own]), (count,), generator=generator, device=device)
            rows = split.stored[own][index]
            target.append(split.standard(rows) if to_clean else split.labels[own][index])
            damaged.append(split.standard(variant(rows, generator) if variant else rows))
        return torch.stack(damaged), torch.stack(target)

    networks = Ensemble(make, len(pairs), device)
    networks.train(draw, draw(min(2 * last, 512), slice(-last, None)), steps)
    return networks


def median(rows: Tensor, shape: tuple[int, int]) -> Tensor:
    """Applies a median filter of 3 x 3 pixels, which ignores unknown ones."""
    padded = functional.pad(rows.reshape(-1, 1, *shape), (1, 1, 1, 1), mode="replicate")
    return padded.unfold(2, 3, 1).unfold(3, 3, 1).flatten(-2).nanmedian(-1).values.flatten(1)


def nearest_mean(split: Split, query: Tensor) -> Tensor:
    """Fills unknown values by the mean of the nearest stored rows, as scikit-learn's KNNImputer with distances does."""
    stored, known = (split.stored / split.scale).double(), (~query.isnan()).double()
    x = (query / split.scale).nan_to_num().double()
    squares = known @ stored.square().T - 2 * x @ stored.T + x.square().sum(1, keepdim=True)
    squares, indices = squares.topk(NEIGHBORS, largest=False)
    weight = 1 / squares.clamp(min=1e-12).sqrt()
    means = (weight[..., None] * split.stored[indices]).sum(1) / weight.sum(1, keepdim=True)
    return torch.where(query.isnan(), means.to(query), query)


def iterative(split: Split, query: Tensor) -> Tensor:
    """Fills unknown values by iterative imputation of scikit-learn."""
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer

    rows = (torch.cat([split.stored[:STORED], query]) - split.center) / split.scale
    values = IterativeImputer(max_iter=5, tol=0).fit_transform(rows.cpu().numpy())[-len(query) :]
    return torch.as_tensor(values).to(query) * split.scale + split.center


def trees(split: Split) -> Callable[[Tensor], Tensor]:
    """Trains gradient-boosted trees with missing values; returns a function from rows to classes."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    stored = split.stored.repeat(4, 1)
    rows = V.Missing(TRAINED)(stored, Generator(stored.device).manual_seed(0))
    model = HistGradientBoostingClassifier(random_state=0).fit(rows.cpu().numpy(), split.labels.repeat(4).cpu().numpy())
    return lambda query: torch.as_tensor(model.predict(query.cpu().numpy())).to(query.device)


def calibration_error(intact: Tensor, right: Tensor) -> float:
    """Returns the mean difference of probability and frequency over ten bins."""
    bins = (intact * 10).long().clamp(0, 9)
    difference = torch.bincount(bins, intact.double(), 10) - torch.bincount(bins, right.double(), 10)
    return difference.abs().sum().item() / len(bins)


def measure(name: str, splits: Sequence[Split], options: Any, results: ResultTable) -> None:
    """Measures all kinds of damage of one data set."""
    shape, own = IMAGES.get(name), cells(name, options.kinds, options.levels)
    kinds = list(dict.fromkeys(kind for kind, _ in own))
    as_rows = shape is None or name in options.as_rows
    dim, classes = splits[0].stored.shape[1], 1 + max(int(split.labels.max()) for split in splits)
    torch.manual_seed(0)
    frozen = train(name, splits, [None], options.steps, lambda: classifier(dim, classes))
    rivals: dict[str, Ensemble] = {}
    made: dict[str, Callable[[], nn.Module]] = {
        "retrained": lambda: classifier(dim, classes),
        "wide": lambda: classifier(dim, classes, 2 * WIDTH),
        "autoencoder": lambda: classifier(dim, dim),
        "cnn": lambda: convolutional(shape or (0, 0), classes),
    }
    for rival in options.networks if options.rivals else ():
        if rival != "cnn" or shape:
            few = splits[: options.rivals]
            rivals[rival] = train(name, few, kinds, options.steps, made[rival], rival == "autoencoder")
    for number, split in enumerate(splits):
        stored = split.stored if as_rows else split.stored.reshape(-1, *shape)  # type: ignore[misc]
        answers = frozen.apply(number, split.standard(split.stored)).argmax(-1)
        memory = ah.AssociativeMemory(stored, labels=None if options.no_labels else answers)
        fit = memory.fit(seed=number, progress=False)
        print(f"{name}, split {number}: {fit}", flush=True)
        boosted = trees(split) if number == 0 and dim <= FEW_COLUMNS and "missing" in kinds else None
        for kind, level in own:
            cell = {"data": name, "as_rows": int(as_rows), "split": number, "kind": kind, "level": level}
            if results.has(cell):
                continue
            generator = Generator(split.stored.device).manual_seed(1000 * number + round(100 * level))
            query = damage(kind, level, split.stored, shape)(split.asked, generator)
            inputs, figures = treated(memory, split, query)
            if shape:
                inputs["median"] = median(query, shape)
            if kind == "missing":
                inputs["k-nearest"] = nearest_mean(split, query)
            if kind == "missing" and boosted:
                inputs["iterative"] = iterative(split, query)
            found = {method: frozen.apply(number, split.standard(each)).argmax(-1) for method, each in inputs.items()}
            for rival, networks in rivals.items() if number < options.rivals else ():
                answer = networks.apply(kinds.index(kind) * options.rivals + number, split.standard(query))
                found[rival] = (frozen.apply(number, answer) if rival == "autoencoder" else answer).argmax(-1)
            if kind == "missing" and boosted:
                found["trees"] = boosted(query)
            found["nearest"] = split.labels[memory.search(query).indices[:, 0]]
            right = {f"accuracy {each}": (it == split.target).double().mean().item() for each, it in found.items()}
            results.add_figures(cell, right | figures | {"fit seconds": fit.seconds})


def treated(memory: ah.AssociativeMemory, split: Split, query: Tensor) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Returns damaged rows as they are, repaired, and repaired with known positions; and figures of the repair."""
    began = time.perf_counter()
    values, intact = memory.repair(query)
    values.sum().item()  # waits for the device
    seconds = time.perf_counter() - began
    known = ~query.isnan()
    wrong, suspicious = (query != split.asked) & known, (intact < 0.5) & known
    both = (suspicious & wrong).sum().item()
    figures = {
        "changed": ((values != query) & known).any(1).double().mean().item(),
        "precision": both / max(1, suspicious.sum().item()),
        "recall": both / max(1, wrong.sum().item()),
        "calibration error": calibration_error(intact[known], ~wrong[known]),
        "seconds": seconds,
    }
    all_wrong = ~(known & ~wrong).any(1, keepdim=True)  # without a known value, a query is refused
    bound = memory.repair(torch.where(wrong & ~all_wrong, torch.nan, query)).values
    return {"frozen": query, "repaired": values, "known": bound}, figures


def report(rows: Sequence[Row]) -> str:
    """Returns a table of means over the splits for each data set, and the smallest gain over the frozen network."""
    lines = []
    for (name, as_rows), own in group(rows, "data", "as_rows").items():
        measures = list(dict.fromkeys(row["measure"] for row in own))
        means = {
            at: {each: np.mean([float(row["value"]) for row in some]) for (each,), some in group(of, "measure").items()}
            for at, of in group(own, "kind", "level").items()
        }
        body = [
            [*at, *(f"{mean[each]:.3f}" if each in mean else "" for each in measures)] for at, mean in means.items()
        ]
        header = ["kind", "level", *(each.removeprefix("accuracy ") for each in measures)]
        gains = {at: mean["accuracy repaired"] - mean["accuracy frozen"] for at, mean in means.items()}
        worst = min(gains, key=lambda at: gains[at])
        lines.append(f"\n{name}, stored as {'rows' if as_rows == '1' else 'images'}\n\n{table(header, body)}\n")
        lines.append(f"smallest gain over the frozen network: {gains[worst]:+.3f} ({' '.join(worst)})")
    return "\n".join(lines)


def short(rows: Sequence[Row], sets: Sequence[str] = SHOWN) -> str:
    """Returns a table for the documentation: the frozen network alone, after repair, and the best trained rival."""
    data = [name for name in sets if any(row["data"] == name for row in rows)]
    body = []
    for (kind, level), own in group(rows, "kind", "level").items():
        cells = []
        for name in data:
            means = {
                each.removeprefix("accuracy "): np.mean([float(row["value"]) for row in some])
                for (each,), some in group([row for row in own if row["data"] == name], "measure").items()
            }
            rival = max((means[each] for each in NETWORKS if each in means), default=0.0)
            figures = [f"{each:.3f}" for each in (means.get("repaired", 0.0), rival)]
            shown = " ".join(bold_best(figures))
            cells.append(f"{means['frozen']:.3f} {shown}" if means else "")
        body.append([kind, level, *cells])
    return table(["damage", "share", *data], body)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what is not in the output file, and prints the tables."""
    parser = make_parser("repair", __doc__)
    add = parser.add_argument
    add("--sets", nargs="+", choices=SETS, default=["digits"], help="data sets (default: digits)")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of damage (default: all)")
    add("--levels", nargs="+", type=float, help="shares of damaged values (default: those of each kind)")
    add("--splits", type=int, default=5, help="number of random splits (default: %(default)s)")
    add("--rivals", type=int, default=3, help="number of splits with trained rivals (default: %(default)s)")
    add("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="trained rivals (default: all)")
    add("--steps", type=int, default=4000, help="most training steps of a network (default: %(default)s)")
    add("--as-rows", nargs="*", choices=IMAGES, default=["digits"], help="images stored as rows (default: digits)")
    add("--no-labels", action="store_true", help="fit memories without the answers of the network")
    add("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    add("--output", type=Path, default=RESULTS / "repair.csv", help="default: benchmarks/results/repair.csv")
    add_data_dir(parser, "faces/yale_b.npz, mnist, tabular and wifi")
    options = parser.parse_args(arguments)
    options.rivals = min(options.rivals, options.splits)
    results = ResultTable(options.output, options.device)
    for name in options.sets:
        began, key = time.perf_counter(), {"data": name, "as_rows": int(name not in IMAGES or name in options.as_rows)}
        keys = [key | {"kind": kind, "level": level} for kind, level in cells(name, options.kinds, options.levels)]
        if not all(results.has(each | {"split": split}) for each in keys for split in range(options.splits)):
            with explain_missing_data():
                splits = [load(name, options.data_dir, s, torch.device(options.device)) for s in range(options.splits)]
            measure(name, splits, options, results)
            print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
    print(report(results.own_rows))


if __name__ == "__main__":
    main()
