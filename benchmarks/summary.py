"""The summaries at the top of the benchmark pages: a line for each comparison, and which method is best in it."""

import re
from collections.abc import Iterable, Sequence
from statistics import mean, stdev

from benchmarks.harness.report import group, number, table
from benchmarks.harness.rows import Row
from benchmarks.kernels_report import has_blocks
from benchmarks.paper.figures import TABULAR
from benchmarks.paper.mil.report import NAMES as POOLINGS
from benchmarks.paper.retrieval.report import GUESSED, LIMIT
from benchmarks.paper.tabular.report import AREA_SETS, TITLES
from benchmarks.search.packaged import OWN

ATTENTIONS = ("dot", "adaptive:blocks=4")
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


def _cell(entries: Entries, name: str, digits: int, note: str = "") -> str:
    """Returns a mean, bold if it is the best."""
    shown = f"{mean(entries[name]):.{digits}f}"
    return (f"**{shown}**" if winner(entries) == name else shown) + note


def _line(comparison: str, entries: Entries, dot: str, adaptive: str, digits: int = 3) -> list[list[str]]:
    """Returns the line of a comparison, or nothing without its rows: dot product, adaptive similarity, best other."""
    entries = {name: values for name, values in entries.items() if values}
    if not {dot, adaptive} <= entries.keys():
        return []
    others = [name for name in entries if name not in (dot, adaptive)]
    best = sorted(others, key=lambda name: mean(entries[name]))[-1:]
    shown = {name: entries[name] for name in (dot, adaptive, *best)}
    cells = [_cell(shown, name, digits, f" {name}" if name in best else "") for name in shown]
    return [[comparison, *cells, *[""] * (not best)]]


def _values(rows: Iterable[Row], column: str, *, by: str, value: str = "value") -> Entries:
    """Returns the values of each method: means of the rows that share a run, seed or repeat, the column ``by``."""
    groups = group(rows, column)
    return {
        name: [mean(float(row[value]) for row in same) for same in group(mine, by).values()]
        for (name,), mine in groups.items()
    }


def accuracy(retrieval: Sequence[Row], bags: Sequence[Row], images: Sequence[Row], tables: Sequence[Row]) -> str:
    """Returns the summary of the accuracy page."""
    body: list[list[str]] = []
    for data, level, title in (("synthetic", "0.5", "random patterns"), ("mnist", "0.7", "MNIST digits")):
        here = [row for row in retrieval if (row["data"], row["noise"]) == (data, level)]
        kept = [row for row in here if row["system"] not in (LIMIT, GUESSED, "A-Hop", "A-Hop, debias, table")]
        entries = _values(kept, "system", by="run", value="accuracy")
        body += _line(f"retrieval of {title}, level {level}, accuracy", entries, "M-Hop", "A-Hop, debias")
    for measure, title in (("auc", ""), ("noise 2.0", ", noise in test bags")):
        here = [row for row in bags if (row["part"], row["measure"]) == ("nested", measure)]
        entries = {POOLINGS[name]: values for name, values in _values(here, "pooling", by="repeat").items()}
        entries.pop("A-Hop, fast", None)
        count = len(group(here, "data"))
        body += _line(f"bags{title}, mean AUC of {count} data sets", entries, "M-Hop", "A-Hop", digits=4)
    body += _line("CIFAR-10, the paper's ViT, accuracy", _best_rates(images), *ATTENTIONS)
    for measure, title in (("accuracy", "clean"), ("mask 0.5", "half of the patches masked")):
        here = [row for row in images if (row["setup"], row["measure"]) == ("working", measure)]
        kept = [row for row in here if row["attention"] in ATTENTIONS]
        body += _line(f"CIFAR-10, small ViT, {title}, accuracy", _values(kept, "attention", by="seed"), *ATTENTIONS)
    for measure, names in (("accuracy", set(TABULAR) - set(AREA_SETS)), ("roc_auc", AREA_SETS)):
        tuned = [row for row in tables if (row["settings"], row["kind"]) == ("all rows", "run")]
        here = [row for row in tuned if row["measure"] == measure and row["set"] in names]
        title = f"{len(group(here, 'set'))} tables, mean {TITLES[measure]}"
        body += _line(title, _values(here, "model", by="number"), "M-Hop", "A-Hop", digits=4)
    header = ["comparison", "dot product", "adaptive", "best other method"]
    return f"{table(header, body)}\n\n{RULE}"


def _best_rates(images: Sequence[Row]) -> Entries:
    """Returns the accuracies of each attention in the paper's setup, with its best learning rate."""
    here = [row for row in images if (row["setup"], row["measure"]) == ("paper", "accuracy")]
    best: Entries = {}
    for (attention, _), mine in group(here, "attention", "settings").items():
        values = [float(row["value"]) for row in mine]
        if attention in (*ATTENTIONS, "kernel", "sparse") and mean(values) > mean(best.get(attention, [0.0])):
            best[attention] = values
    return best


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
    body = [[name, other, f"{_reach(each)} x", _faster(each, other)] for name, other, each in lines if each]
    return table(["comparison", "baseline", "speed relative to it", "faster"], body)


def search(rows: Sequence[Row]) -> str:
    """Returns the summary of the search page."""
    body = []
    for data, kind, level in SEARCHES:
        here = [row for row in rows if (row["data"], row["kind"], row["level"]) == (data, kind, level)]
        entries = _values(here, "method", by="split", value="accuracy")
        if set(METHODS) <= entries.keys():
            cells = [_cell(entries, name, 3) for name in METHODS]
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
