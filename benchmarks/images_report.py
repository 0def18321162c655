"""The rows of benchmarks/images.py, shown as tables and as a picture."""

import statistics
from collections import defaultdict
from pathlib import Path

from benchmarks.rows import Rows

KEYS = ("setup", "settings", "attention", "seed")
PAPER = {
    "cifar10": {"dot": 0.5123, "kernel": 0.5489, "adaptive": 0.5637},
    "cifar100": {"dot": 0.2464, "kernel": 0.2877, "adaptive": 0.2904},
    "tiny-imagenet": {"dot": 0.1095, "kernel": 0.1164, "adaptive": 0.1213},
}


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
