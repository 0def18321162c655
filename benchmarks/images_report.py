"""The rows of benchmarks/images.py: kept in a CSV file, shown as tables and as a picture."""

import csv
import os
import statistics
import subprocess
from collections import defaultdict
from datetime import date
from pathlib import Path

import torch

import ahop_layers as ah
from benchmarks.kernels import describe

RESULTS = Path(__file__).parent / "results" / "images.csv"
KEYS = ("setup", "settings", "attention", "seed")
PAPER = {
    "cifar10": {"dot": 0.5123, "kernel": 0.5489, "adaptive": 0.5637},
    "cifar100": {"dot": 0.2464, "kernel": 0.2877, "adaptive": 0.2904},
    "tiny-imagenet": {"dot": 0.1095, "kernel": 0.1164, "adaptive": 0.1213},
}


class Rows:
    """One row for each figure: what was measured, how, and on which machine, versions and commit."""

    def __init__(self, path: Path) -> None:
        self.path, self.machine = path, {}
        self.rows: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="") as file:
                self.rows = list(csv.DictReader(file))

    def about(self, device: str) -> None:
        """Say where the rows to come are measured."""
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=RESULTS.parent
        )
        self.machine = {
            "device": describe(device.partition(":")[0], torch.get_num_threads()),
            "torch": torch.__version__,
            "ahop_layers": ah.__version__,
            "commit": commit.stdout.strip(),
            "date": date.today().isoformat(),
        }

    def holds(self, key: dict[str, str]) -> bool:
        """Whether this has been measured on this device."""
        wanted = key | {"device": self.machine["device"]}
        return any(all(row[name] == text for name, text in wanted.items()) for row in self.rows)

    def add(self, key: dict[str, str], measured: dict[str, float]) -> None:
        """Keep the figures of one measurement, all of them or none."""
        self.rows += [
            {**key, "measure": name, "value": f"{value:.6g}", **self.machine} for name, value in measured.items()
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        with part.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.rows[-1])
            writer.writeheader()
            writer.writerows(self.rows)
        os.replace(part, self.path)


def report(rows: Rows, setup: str | None, picture: Path) -> None:
    """Print the tables of one set-up, or of all, and draw the picture if there is something to draw."""
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = defaultdict(list)
    for row in rows.rows:
        groups[row["setup"], row["settings"], row["device"]].append(row)
    for (name, settings, device), group in groups.items():
        if setup in (None, name):
            print(f"\n{name}: {settings} ({device})\n")
            (speed_table if name == "throughput" else accuracy_table)(group)
    working = [group for (name, *_), group in groups.items() if name == "working"]
    if working and setup in (None, "working"):
        draw(working[-1], picture)
        print(f"\npicture: {picture}")


def by_attention(group: list[dict[str, str]]) -> dict[str, dict[str, dict[str, float]]]:
    """attention -> measure -> seed -> value."""
    table: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in group:
        table[row["attention"]][row["measure"]][row["seed"]] = float(row["value"])
    return table


def accuracy_table(group: list[dict[str, str]]) -> None:
    """Mean and deviation over seeds, the mean difference from the dot product of the same seeds, the paper's figure."""
    paper = PAPER.get(group[0]["settings"].split(",")[0], {}) if group[0]["setup"] == "paper" else {}
    table = by_attention(group)
    print("| attention | measure | seeds | accuracy | deviation | above dot, same seeds | paper |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for attention, measures in table.items():
        for measure, seeds in measures.items():
            if measure == "seconds":
                continue
            values, dot = list(seeds.values()), table["dot"][measure] if "dot" in table else {}
            pairs = [value - dot[seed] for seed, value in seeds.items() if seed in dot]
            spread = f"{statistics.stdev(values):.4f}" if len(values) > 1 else ""
            above = f"{statistics.mean(pairs):+.4f}" if pairs and attention != "dot" else ""
            known = f"{paper[attention]:.4f}" if measure == "accuracy" and attention in paper else ""
            shown = (attention, measure, len(values), f"{statistics.mean(values):.4f}", spread, above, known)
            print("| " + " | ".join(map(str, shown)) + " |")


def speed_table(group: list[dict[str, str]]) -> None:
    """Every figure, and its ratio to that of the dot product in the same run."""
    table = {
        attention: {m: max(s.values()) for m, s in each.items()} for attention, each in by_attention(group).items()
    }
    names = list(dict.fromkeys(row["measure"] for row in group))
    print("| attention | " + " | ".join(f"{name} | / dot" for name in names) + " |")
    print("| --- |" + " --- | --- |" * len(names))
    for attention, figures in table.items():
        cells = []
        for name in names:
            ratio = figures[name] / table["dot"][name] if "dot" in table else None
            cells += [f"{figures[name]:,.0f}", "" if ratio is None else f"{ratio:.2f}"]
        print(f"| {attention} | " + " | ".join(cells) + " |")


def draw(group: list[dict[str, str]], path: Path) -> None:
    """Accuracy against the strength of each corruption, a line for each attention, a bar from seed to seed."""
    from matplotlib.figure import Figure

    table = by_attention(group)
    kinds = list(dict.fromkeys(row["measure"].split()[0] for row in group if " " in row["measure"]))
    titles = {"noise": "pixel noise (deviation)", "mask": "masked patches (share)", "bias": "bias of the colours"}
    figure = Figure(figsize=(4.2 * len(kinds), 3.6), layout="constrained", facecolor="white")
    for axis, kind in zip(figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0], kinds, strict=True):
        for attention, measures in table.items():
            chosen = {0.0: measures["accuracy"]}
            chosen |= {float(name.split()[1]): seeds for name, seeds in measures.items() if name.startswith(kind)}
            means = [statistics.mean(seeds.values()) for seeds in chosen.values()]
            reach = [[abs(f(seeds.values()) - mean) for seeds, mean in zip(chosen.values(), means, strict=True)]
                     for f in (min, max)]  # fmt: skip
            axis.errorbar(list(chosen), means, reach, marker="o", markersize=4, capsize=3, label=attention)
        axis.set(xlabel=titles.get(kind, kind))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("test accuracy")
    figure.axes[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
