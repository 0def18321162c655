"""Tables and plot of the image benchmark."""

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from decimal import Decimal

from benchmarks.harness.report import bold_best, group, row_table, spread, table
from benchmarks.harness.rows import Row
from benchmarks.paper.figures import IMAGES


def report(rows: Sequence[Row], setups: Collection[str]) -> str:
    """The tables of some setups, each below its settings."""
    parts = []
    for (name, settings, device), mine in group(map(_split_rate, rows), "setup", "settings", "device").items():
        if name in setups:
            make, caption = TABLES[name]
            parts += [f"{caption} Settings: {settings}; {device}.", make(mine)]
    return "\n\n".join(parts)


def _split_rate(row: Row) -> Row:
    """Moves the learning rate from the settings to a column of its own, if one table shows all rates."""
    settings, _, rate = row["settings"].partition(", lr ")
    return row | {"settings": settings, "rate": rate} if row["setup"] == "paper" else row


def by_attention(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """Returns attention -> measure -> seed -> value. The dot product, the baseline, comes first."""
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in sorted(rows, key=lambda row: row["attention"] != "dot"):
        found[row["attention"]][row["measure"]][row["seed"]] = float(row["value"])
    return found


def rate_table(rows: Sequence[Row]) -> str:
    """Accuracy with a column for each learning rate: mean and, of several seeds, the standard deviation.

    The best learning rate of an attention is bold if it was trained with several.
    """
    accuracies = [row for row in rows if row["measure"] == "accuracy"]
    by_rate = {
        rate: {attention: measures["accuracy"] for attention, measures in by_attention(mine).items()}
        for (rate,), mine in sorted(group(accuracies, "rate").items(), key=lambda item: float(item[0][0]))
    }
    names = sorted({row["attention"] for row in accuracies}, key=lambda name: (name != "dot", ":" in name, name))
    best = {name: max(statistics.mean(of[name].values()) for of in by_rate.values() if name in of) for name in names}
    paper, body = IMAGES.get(rows[0]["settings"].split(",")[0], {}), []
    for name in names:
        cells = [spread([*of.get(name, {}).values()], 4) for of in by_rate.values()]
        marked = bold_best(cells) if sum(map(bool, cells)) > 1 else cells
        gain = f"{best[name] - best['dot']:+.4f}" if "dot" in best and name != "dot" else ""
        body.append([name, *marked, gain, f"{paper[name]:.4f}" if name in paper else ""])
    rates = [f"lr {Decimal(rate):f}" for rate in by_rate]
    return table(["attention", *rates, "best minus best of dot", "paper"], body)


def _difference(seeds: dict[str, float], baseline: dict[str, float]) -> str:
    """Mean difference over the seeds of both."""
    pairs = [value - baseline[seed] for seed, value in seeds.items() if seed in baseline]
    return f"{statistics.mean(pairs):+.4f}" if pairs else ""


def damage_table(rows: Sequence[Row]) -> str:
    """Mean accuracy of every attention with every kind of damage, the best one bold, and the differences from dot."""
    found = by_attention(rows)
    others = [attention for attention in found if attention != "dot"]
    body = []
    for (measure,) in group(rows, "measure"):
        seeds = {attention: measures.get(measure, {}) for attention, measures in found.items()}
        means = [f"{statistics.mean(values.values()):.4f}" if values else "" for values in seeds.values()]
        differences = [_difference(seeds[other], seeds.get("dot", {})) for other in others]
        body.append(["none" if measure == "accuracy" else measure, *bold_best(means), *differences])
    count = {attention: len(measures["accuracy"]) for attention, measures in found.items()}
    names = [f"{attention} ({seeds} seed{'s' if seeds > 1 else ''})" for attention, seeds in count.items()]
    return table(["damage", *names, *(f"{other} minus dot" for other in others)], body)


def repair_table(rows: Sequence[Row]) -> str:
    """Accuracy by the share of the values that are replaced: mean and standard deviation, the best one bold."""
    lines = []
    for attention, found in by_attention(row for row in rows if row["measure"] != "accuracy").items():
        names, shares = (dict.fromkeys(name.rpartition(" ")[place] for name in found) for place in (0, 2))
        for share in shares:
            cells = bold_best([spread([*found[f"{name} {share}"].values()]) for name in names])
            lines.append([attention, f"{float(share):.0%}", *cells])
    return table(["attention", "replaced", *names], lines)


TABLES = {
    "paper": (rate_table, "Test accuracy with the paper's setup, by learning rate."),
    "working": (damage_table, "Test accuracy of a small ViT on damaged images."),
    "repair": (repair_table, "Test accuracy of a small ViT on images of which a share of the values is replaced."),
    "throughput": (row_table, "Throughput of a small ViT."),
}
"""The table of a setup, and its caption."""
