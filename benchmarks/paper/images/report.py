"""The rows of benchmarks/images.py, shown as tables and as a picture."""

import statistics
from collections import defaultdict
from collections.abc import Collection, Sequence
from decimal import Decimal
from pathlib import Path

from benchmarks.harness.report import Row, drawing, group, table
from benchmarks.paper.figures import IMAGES

KEYS = ("setup", "settings", "attention", "seed")


def report(rows: Sequence[Row], setups: Collection[str]) -> str:
    """The tables of some set-ups, each below what it was measured with."""
    parts = []
    for (name, settings, device), mine in group(map(_rate_apart, rows), "setup", "settings", "device").items():
        if name in setups:
            parts += [f"{name}: {settings} ({device})", TABLES[name](mine)]
    return "\n\n".join(parts)


def _rate_apart(row: Row) -> Row:
    """Take the learning rate out of the settings where one table shows all rates."""
    settings, _, rate = row["settings"].partition(", lr ")
    return row | {"settings": settings, "rate": rate} if row["setup"] == "paper" else row


def by_attention(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """attention -> measure -> seed -> value; first the dot product, with which the others are compared."""
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in sorted(rows, key=lambda row: row["attention"] != "dot"):
        found[row["attention"]][row["measure"]][row["seed"]] = float(row["value"])
    return found


def rate_tables(rows: Sequence[Row]) -> str:
    """Accuracies by learning rate, beside the paper's; then how far each is above the dot product at the same rate."""
    accuracies = [row for row in rows if row["measure"] == "accuracy"]
    by_rate = {
        rate: {attention: measures["accuracy"] for attention, measures in by_attention(mine).items()}
        for (rate,), mine in sorted(group(accuracies, "rate").items(), key=lambda item: float(item[0][0]))
    }
    names = sorted({row["attention"] for row in accuracies}, key=lambda name: (name != "dot", ":" in name, name))
    means = {name: [_mean(of.get(name, {}).values()) for of in by_rate.values()] for name in names}
    best = {name: max(mean for mean in line if mean is not None) for name, line in means.items()}
    paper = IMAGES.get(rows[0]["settings"].split(",")[0], {})
    accuracy, above = [], []
    for name in names:
        cells, pairs = [], []
        for mean, of in zip(means[name], by_rate.values(), strict=True):
            values, dot = of.get(name, {}), of.get("dot", {})
            spread = f" ±{statistics.stdev(values.values()):.4f}" if len(values) > 1 else ""
            shown = "" if mean is None else f"{mean:.4f}{spread} ({len(values)})"
            cells.append(f"**{shown}**" if mean == best[name] and means[name].count(None) + 1 < len(by_rate) else shown)
            pairs.append(_mean([value - dot[seed] for seed, value in values.items() if seed in dot]))
        gain = f"{best[name] - best['dot']:+.4f}" if "dot" in best and name != "dot" else ""
        accuracy.append([name, *cells, gain, f"{paper[name]:.4f}" if name in paper else ""])
        above.append([name, *("" if pair is None else f"{pair:+.4f}" for pair in pairs)])
    rates = [f"rate {Decimal(rate):f}" for rate in by_rate]
    parts = [table(["attention", *rates, "best above the dot product's best", "paper"], accuracy)]
    compared = [line for line in above if line[0] != "dot" and any(line[1:])]
    if compared:
        parts += ["Above the dot product at the same rate, same seeds:", table(["attention", *rates], compared)]
    return "\n\n".join(parts)


def _mean(values: Collection[float]) -> float | None:
    return statistics.mean(values) if values else None


def corruption_table(rows: Sequence[Row]) -> str:
    """A line for each corruption: the mean of every attention, and how far it is above the dot product, same seeds."""
    found = by_attention(rows)
    others = [attention for attention in found if attention != "dot"]
    body = []
    for (measure,) in group(rows, "measure"):
        seeds = {attention: measures.get(measure, {}) for attention, measures in found.items()}
        means = [f"{statistics.mean(each.values()):.4f}" if each else "" for each in seeds.values()]
        pairs = [[value - seeds["dot"][seed] for seed, value in seeds[other].items() if seed in seeds.get("dot", {})]
                 for other in others]  # fmt: skip
        above = [f"{statistics.mean(each):+.4f}" if each else "" for each in pairs]
        body.append(["nothing" if measure == "accuracy" else measure, *means, *above])
    count = {attention: len(measures["accuracy"]) for attention, measures in found.items()}
    names = [f"{attention} ({seeds} seeds)" for attention, seeds in count.items()]
    return table(["corrupted by", *names, *(f"{other} above dot" for other in others)], body)


def speed_table(rows: Sequence[Row]) -> str:
    """Every figure, and its ratio to that of the dot product in the same run."""
    found = {
        attention: {name: max(seeds.values()) for name, seeds in measures.items()}
        for attention, measures in by_attention(rows).items()
    }
    names, body = list(dict.fromkeys(row["measure"] for row in rows)), []
    for attention, figures in found.items():
        cells = [attention]
        for name in names:
            ratio = figures[name] / found["dot"][name] if "dot" in found else None
            cells += [f"{figures[name]:,.0f}", "" if ratio is None else f"{ratio:.2f}"]
        body.append(cells)
    return table(["attention", *(cell for name in names for cell in (name, "/ dot"))], body)


TABLES = {"paper": rate_tables, "working": corruption_table, "throughput": speed_table}
"""What shows the rows of a set-up."""


def draw(rows: Sequence[Row], path: Path) -> bool:
    """Accuracy against the strength of each corruption, from the last working set-up; False where there is none.

    A line for each attention, a bar from the lowest to the highest of its seeds.
    """
    working = list(group((row for row in rows if row["setup"] == "working"), "settings", "device").values())
    if not working:
        return False
    found = by_attention(working[-1])
    kinds = list(dict.fromkeys(row["measure"].split()[0] for row in working[-1] if " " in row["measure"]))
    titles = {"noise": "pixel noise (deviation)", "mask": "masked patches (share)", "bias": "bias of the colours"}
    with drawing(path, (3 * len(kinds), 3.4)) as figure:
        for axis, kind in zip(figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0], kinds, strict=True):
            for attention, measures in found.items():
                chosen = {0.0: measures["accuracy"]}
                chosen |= {float(name.split()[1]): seeds for name, seeds in measures.items() if name.startswith(kind)}
                means = [statistics.mean(seeds.values()) for seeds in chosen.values()]
                reach = [[abs(f(seeds.values()) - mean) for seeds, mean in zip(chosen.values(), means, strict=True)]
                         for f in (min, max)]  # fmt: skip
                axis.errorbar(list(chosen), means, reach, marker="o", markersize=4, capsize=3, label=attention)
            axis.set(xlabel=titles.get(kind, kind))
            axis.grid()
        figure.axes[0].set_ylabel("test accuracy")
        figure.axes[0].legend(frameon=False)
    return True
