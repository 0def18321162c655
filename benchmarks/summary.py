"""Summaries of the pages: a line for each comparison, and which method is best in it."""

import re
from collections.abc import Sequence
from statistics import mean, stdev

from benchmarks.harness.report import group, number, table
from benchmarks.harness.rows import Row
from benchmarks.kernels_report import has_blocks
from benchmarks.search.packaged import OWN

SEARCHES = (
    ("faces", "pixels", "0.5"), ("faces", "pixels", "0.8"),
    ("faces", "occlusion", "0.3"), ("faces", "occlusion", "0.7"),
    ("digits", "pixels", "0.5"), ("digits", "pixels", "0.8"), ("digits", "occlusion", "0.3"),
)  # fmt: skip
"""Data set, kind of damage and level of each line of the summary of the search page."""
DAMAGES = {"pixels": "of the pixels replaced", "occlusion": "of the area covered"}
METHODS = (*reversed(OWN), "CNN", "sparse representation", "Euclid")
"""The first columns are those that a phone shows without scrolling."""
COVERAGES = ("fully", "partly", "not")

Entries = dict[str, list[float]]
"""Method -> its values in the runs, splits or seeds of a benchmark."""

RULE = (
    "A value is bold if it is better than the others of its line by more than the standard deviation over runs."
    " Where none is bold, none is clearly better."
)


def winner(entries: Entries) -> str | None:
    """Returns the method with the highest mean, or None if the next one is within a standard deviation of it."""
    first, *rest = sorted(entries, key=lambda name: mean(entries[name]), reverse=True)
    gap = min((mean(entries[first]) - mean(entries[other]) for other in rest), default=1.0)
    deviations = [stdev(entries[name]) for name in (first, *rest[:1]) if len(entries[name]) > 1]
    return first if gap > max(deviations, default=0.0) else None


def _cell(entries: Entries, name: str) -> str:
    """Returns a mean, bold if it is the best."""
    shown = f"{mean(entries[name]):.3f}"
    return f"**{shown}**" if winner(entries) == name else shown


def _reach(ratios: Sequence[float]) -> str:
    ends = [f"{end:.2f}" if end < 1 else number(end) for end in (min(ratios), max(ratios))]
    return " to ".join(dict.fromkeys(ends))


def _faster(ratios: Sequence[float], baseline: str) -> str:
    """Returns which side is faster, and in how many cases if not in all."""
    ours = sum(ratio > 1 for ratio in ratios)
    if ours in (0, len(ratios)):
        return "**ours**" if ours else f"**{baseline}**"
    return f"**ours** in {ours} of {len(ratios)} cases"


def speed(layers: Sequence[Row], vit: Sequence[Row], kernels: Sequence[Row], packed: Sequence[Row]) -> str:
    """Returns the summary of the speed page."""
    fused, plain = "fused dot product", "plain PyTorch"
    lines: list[tuple[str, str, list[float]]] = []
    default = [row for row in layers if row["system"] == "adaptive"]
    for (device, precision), mine in group(default, "device", "precision").items():
        ratios = [float(row["hflayers ms"]) / float(row["ms"]) for row in mine]
        lines.append((f"training of Hopfield layers, {precision}, {device}", "hopfield-layers", ratios))
    for attention, title in (
        ("4 blocks", "4 blocks"),
        ("last 4", "4 blocks, last four layers"),
        ("full", "full footprints"),
    ):
        for label in ("training", "inference"):
            here = [row for row in vit if (row["attention"], row["pass"], row["part"]) == (attention, label, "eager")]
            ratios = [float(row["images/s"]) / float(row["sdpa images/s"]) for row in here]
            if label == "training" or attention == "4 blocks":
                lines.append((f"{label} of a ViT, {title}, images/s", fused, ratios))
    full = [row for row in kernels if row["paper/ours"] and not has_blocks(row) and "weights" not in row["case"]]
    for (device,), mine in group(full, "device").items():
        ratios = [float(row["paper/ours"]) for row in mine if row["pass"] == "forward + backward"]
        lines.append((f"full footprints, forward + backward, {device}", plain, ratios))
    ratios = [float(row["faster"]) for row in packed if row["pass"] == "forward+backward"]
    lines.append(("bags of different sizes, forward + backward", "padding", ratios))
    body = [[name, other, f"{_reach(each)}\xa0x", _faster(each, other)] for name, other, each in lines if each]
    return table(["comparison", "baseline", "speed relative to it", "faster"], body)


def search(rows: Sequence[Row]) -> str:
    """Returns the summary of the search page."""
    body = []
    for data, kind, level in SEARCHES:
        here = [row for row in rows if (row["data"], row["kind"], row["level"]) == (data, kind, level)]
        entries = {name: [float(row["accuracy"]) for row in mine] for (name,), mine in group(here, "method").items()}
        if set(METHODS) <= entries.keys():
            cells = [_cell(entries, name) for name in METHODS]
            body.append([f"{data}, {100 * float(level):.0f} % {DAMAGES[kind]}", *cells])
    return f"{table(['accuracy', *METHODS], body)}\n\n{RULE}"


def models(run: Sequence[Row], names: Sequence[Row]) -> str:
    """Returns the summary of the page of models."""

    def counts(rows: Sequence[Row]) -> list[str]:
        return [str(len(rows)), *(str(sum(row["coverage"] == kind for row in rows)) for kind in COVERAGES)]

    body = []
    for (library,), mine in group(run, "library").items():
        changes = [float(row["change"]) for row in mine if row["change"]]
        body.append([f"{library}, architectures", *counts(mine), f"{max(changes):.1e}"])
    if names:
        body.append(["timm, all models with attention", *counts(names), ""])
    graphs = [row["one_graph"] for row in run if row["one_graph"]]
    one = sum(each == "yes" for each in graphs)
    note = (
        f"{one} of the {len(graphs)} adapted models compile to one graph. The plain models of the others do not either."
        if all(re.match("yes|the plain model is not", each) for each in graphs)
        else f"{one} of the {len(graphs)} adapted models compile to one graph."
    )
    header = ["library", "tried", *COVERAGES, "largest change of an output"]
    return f"{table(header, body)}\n\n{note}"
