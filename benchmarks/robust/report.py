"""Tables and the plot of the rows of ``python -m benchmarks.robust``."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from benchmarks.harness.report import GRAY, bold_best, bold_best_in_columns, drawing, group, table
from benchmarks.harness.rows import Row
from benchmarks.robust.tasks import NAMES

ABLATION = {
    "L1": "L1",
    "trimmed L1": "L1 of a share of the ranks, the best one",
    "ranks of L1": "L1 with learned weights of ranks",
    "saturating bases": "saturating bases with learned weights, not sorted",
    "saturating bases, ranks": "saturating bases with learned weights of ranks: the default",
}
"""Method -> its line in the table."""


SHORT = ("Euclid", "L1", "trimmed L1", "clipped L1", "exp(-d/w)", "not fitted", "fitted, not sorted", "fitted")
"""The methods of the table of levels."""


def levels(rows: Sequence[Row]) -> str:
    """Mean accuracy over the splits: a line for each data set and for some levels of damage."""
    body, times = [], []
    for (name,), here in group(rows, "data").items():
        levels = sorted({level for (level,) in group(here, "level") if float(level) >= 0}, key=float)
        times.append(_mean([row for row in here if float(row["level"]) < 0]))
        for level in levels if len(levels) < 6 else (levels[0], levels[2], *levels[4:]):
            found = {
                method: _mean(mine) for (method, at), mine in group(here, "method", "level").items() if at == level
            }
            body.append([_what(name), level, *bold_best([f"{found[method]:.3f}" for method in SHORT])])
    title = f"Accuracy, {_splits(rows)}. A fit over all levels takes {min(times):.1f} to {max(times):.1f} s."
    return title + "\n\n" + table(["data", "level", *SHORT], body)


def missing(rows: Sequence[Row], least: float = 0.0) -> str:
    """Mean accuracy over the splits: a line for each data set and share of missing values that is at ``least`` this."""
    methods = ("fitted", "not fitted", "L1", "Euclid")
    body, lead = [], {"L1": 1.0, "Euclid": 1.0}
    for (name, share), here in group(rows, "data", "level").items():
        found = {method: _mean(mine) for (method,), mine in group(here, "method").items()}
        lead = {method: min(before, found["fitted"] - found[method]) for method, before in lead.items()}
        cells = bold_best([f"{found[method]:.3f}" for method in methods])
        if float(share) >= least:
            body.append([_what(name), f"{100 * float(share):.0f} %", *cells])
    title = (
        f"Accuracy with missing values, {_splits(rows)}. The highest is bold. The smallest lead of *fitted* is"
        f" {lead['L1']:+.3f} over L1 and {lead['Euclid']:+.3f} over Euclid."
    )
    return title + "\n\n" + table(["data", "missing", *methods], body)


def pairs(rows: Sequence[Row]) -> str:
    """Mean accuracy over levels and splits: a line for each number of pairs, and a column for each data set."""
    names = [name for (name,) in group(rows, "data")]
    found = _by_data(rows, "method", "level")
    lines: dict[tuple[str, ...], str] = {("not fitted", "0"): "none: not fitted"}
    lines |= {key: key[1] for key in found if key[0] == "pairs"}
    lines["damage", "0"] = "none: the damage itself"
    body = [[text, *(f"{found[key][name]:.3f}" for name in names)] for key, text in lines.items()]
    title = f"Accuracy after a fit from pairs, mean over the levels of damage, {_splits(rows)}."
    return title + "\n\n" + table(["pairs", *map(_what, names)], body)


def draw_pairs(rows: Sequence[Row], path: Path) -> Path:
    """Draws accuracy against the number of pairs, a panel for each data set."""
    with drawing(path, (8, 3.2)) as figure:
        groups = group(rows, "data")
        for axis, ((name,), here) in zip(
            figure.subplots(1, len(groups), squeeze=False)[0], groups.items(), strict=True
        ):
            found = {key: _mean(mine) for key, mine in group(here, "method", "level").items()}
            counts = [level for method, level in found if method == "pairs"]
            axis.plot([int(count) for count in counts], [found["pairs", count] for count in counts], label="pairs")
            axis.axhline(found["damage", "0"], color=GRAY, linestyle="--", label="the damage itself")
            axis.axhline(found["not fitted", "0"], color=GRAY, linestyle=":", label="not fitted")
            axis.set(xlabel="pairs", ylabel="accuracy", title=_title(name))
            axis.set_xscale("log", base=2)
            axis.set_xticks([int(count) for count in counts], counts)
            axis.grid()
            axis.legend(frameon=False)
    return path


def ablation(rows: Sequence[Row]) -> str:
    """Mean accuracy over levels and splits: a line for each score, and a column for each data set."""
    names = [name for (name,) in group(rows, "data")]
    found = _by_data([row for row in rows if float(row["level"]) >= 0], "method")
    added = _by_data([row for row in rows if float(row["level"]) < 0], "method")

    def cell(method: str, name: str) -> str:
        return f"{found[method,][name]:.3f}" + " †" * (added.get((method,), {}).get(name, 0.0) >= 0.5)

    body = [[text, *(cell(method, name) for name in names)] for method, text in ABLATION.items()]
    title = f"Accuracy, mean over the levels of damage, {_splits(rows)}."
    if any("†" in text for line in body for text in line):
        title += " †: in at least half of the splits, the fit took products because they paid."
    body = bold_best_in_columns(body, dict.fromkeys(range(1, len(names) + 1), max))
    return title + "\n\n" + table(["score", *map(_what, names)], body)


def confidence(rows: Sequence[Row]) -> str:
    """Means over the splits, and for false accepts the largest: a line for each data set."""
    columns = ("accuracy", "AUROC", "AUROC of the score", "calibration error", "false accepts", "accepted")
    body = []
    for (name,), here in group(rows, "data").items():
        found = {method: _mean(mine) for (method,), mine in group(here, "method").items()}
        worst = max(float(row["value"]) for row in here if row["method"] == "false accepts")
        explained = f"{found['explained']:.3f}" if "explained" in found else ""
        cells = [f"{found[column]:.3f}" for column in columns]
        body.append([NAMES[name].split(",")[0], *cells, f"{worst:.3f}", explained])
    title = (
        f"Known queries against foreign ones, {_splits(rows)}. Of a face half of the pixels are wrong, of sensors 40 %."
    )
    return title + "\n\n" + table(["data", *columns, "most false accepts", "explained"], body)


def _mean(rows: Sequence[Row]) -> float:
    return mean(float(row["value"]) for row in rows)


def _by_data(rows: Sequence[Row], *columns: str) -> dict[tuple[str, ...], dict[str, float]]:
    """Means over all other columns: by the values of ``columns``, then by data set."""
    return {
        key: {name: _mean(mine) for (name,), mine in group(here, "data").items()}
        for key, here in group(rows, *columns).items()
    }


def _splits(rows: Sequence[Row]) -> str:
    count = len({row["split"] for row in rows})
    return f"{count} split{'s' * (count != 1)}"


def _what(name: str) -> str:
    """The data set without its damage."""
    return NAMES[name].replace(" 70 % erased,", "")


def _title(name: str) -> str:
    return NAMES[name][:1].upper() + NAMES[name][1:]
