"""Generates the tables and plots of the documentation from the rows in benchmarks/results/.

To run: python -m benchmarks.harness.pages (--help prints this text and writes nothing)

A page of docs/ marks the place of a table or plot by ``<!-- made: NAME -->`` and ``<!-- end -->``. The command replaces
the text between the two markers and leaves the rest of the page as it is. A page shows what a reader compares: the
commands print all rows. A benchmark without rows is replaced by the command that measures it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from benchmarks import hflayers, kernels_report, models_report, packed, repair, search_costs, summary, vit, vit_report
from benchmarks.harness.command import make_parser
from benchmarks.harness.report import PICTURES, group
from benchmarks.harness.rows import RESULTS, Row, read, rows_with
from benchmarks.paper.images import report as images_report
from benchmarks.paper.lookup import report as lookup_report
from benchmarks.paper.mil import report as mil_report
from benchmarks.paper.retrieval import measure as retrieval
from benchmarks.paper.retrieval import multimodal
from benchmarks.paper.retrieval import report as retrieval_report
from benchmarks.paper.tabular import report as tabular_report
from benchmarks.projects import adaptive as projects_adaptive
from benchmarks.projects import measure as projects
from benchmarks.robust import report as robust_report
from benchmarks.search import ar
from benchmarks.search import report as search_report
from benchmarks.search.packaged import OWN

DOCS = PICTURES.parent
PLACE = re.compile(r"(<!-- made: ([\w-]+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)

Show = Callable[[Sequence[Row]], str]


def rows_of(file: str, **wanted: str) -> list[Row]:
    """Returns the rows of a results file that have the wanted values."""
    return [row for row in read(RESULTS / file) if wanted.items() <= row.items()]


RIVALS = ("Euclid", "trimmed L1", "sparse representation", "robust coding", "robust coding, tuned", "CNN", *OWN)
"""The methods of the search benchmark that the page shows."""


def search_rows(file: str) -> list[Row]:
    """Returns the rows of the search benchmark of the methods that the page shows."""
    return [row for row in rows_of(file) if row["method"] in RIVALS]


LEVELS = ("data", "patterns", "mask", "noise", "bias", "system")
"""The columns of the retrieval benchmark whose values differ from one cell of a table to another."""


def retrieval_rows(table: str) -> list[Row]:
    """Returns the rows of one table of the retrieval benchmark, from the runs in which every system was measured.

    They come from the device with the most rows: figures of different devices are not compared.
    """
    size, linked = retrieval.Size(), table == "multimodal"
    wanted = multimodal.measurements(size) if linked else retrieval.measurements(table, size, images=True)
    devices = group(rows_of("multimodal.csv" if linked else "retrieval.csv"), "device").values()
    found = max((rows_with(map(asdict, wanted), rows) for rows in devices), key=len, default=[])
    columns = ("concepts", "system_1", "system_2") if linked else LEVELS
    cells = group(found, *columns).values()
    runs = set.intersection(*({row["run"] for row in cell} for cell in cells)) if found else set()
    return [row for row in found if row["run"] in runs]


ORDINARY = re.compile(r"(x \d{3,}|768 x|384 x).*d (1|32|64|784|1024)\b")
"""The sizes of the kernel benchmark that the page shows."""


def kernel_rows() -> list[Row]:
    """Returns the rows of the kernel benchmark of the sizes that the page shows."""
    return [row for row in rows_of("kernels.csv") if ORDINARY.search(row["case"]) and "weights" not in row["case"]]


def attention_rows() -> list[Row]:
    """Returns the rows of the kernel benchmark that measure fused attention."""
    return [row for row in rows_of("kernels.csv") if row["case"].startswith("attention")]


def vit_rows(*parts: str) -> list[Row]:
    """Returns the rows of some parts of the benchmark of vision transformers, of models with their default sizes."""
    sizes = {name: model.settings for name, model in vit.MODELS.items()}
    rows = [row for row in rows_of("vit.csv") if row["part"] in parts]
    return [row for row in rows if sizes.get(row["model"], row["settings"]) == row["settings"]]


def packed_rows() -> list[Row]:
    """Returns the rows of the packed benchmark with its default sizes."""
    return rows_of("packed.csv", **{name: str(size) for name, size in packed.SIZE.items()})


def switching_rows() -> list[Row]:
    """Returns the rows of plain layers and of adaptive layers with default arguments."""
    return [row for row in rows_of("hflayers.csv") if row["system"] in ("plain", "adaptive")]


def part(command: str, rows: Sequence[Row], show: Show, package: str = "benchmarks") -> str:
    """Returns a table and the command, devices, versions and dates that measured it; without rows only the command."""
    if not rows:
        return f"Not measured yet. To measure it: `python -m {package}.{command}`."
    origins = []
    for (device, torch), mine in group(rows, "device", "torch").items():
        commits, dates = ([value for (value,) in group(mine, name)] for name in ("commit", "date"))
        origins.append(f"{device} (torch {torch}, commit {', '.join(commits)}, {', '.join(dates)})")
    return f"{show(rows)}\n\n<small>Measured by `python -m {package}.{command}` on {'; '.join(origins)}.</small>"


def by_device(command: str, rows: Sequence[Row], show: Show) -> str:
    """Returns a :func:`part` for each device."""
    devices = group(rows, "device")
    if len(devices) < 2:
        return part(command, rows, show)
    return "\n\n".join(f"**{device}**\n\n{part(command, mine, show)}" for (device,), mine in devices.items())


def on_gpus(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows that were measured on a GPU."""
    return [row for row in rows if "NVIDIA" in row["device"]]


def of_bags(rows: Sequence[Row], show: Callable[[mil_report.Figures, Sequence[str]], str]) -> str:
    """Returns a table of the bag benchmark."""
    return by_device("paper.mil run", rows, lambda mine: show(mil_report.arrange(mine), mil_report.data_sets(mine)))


def of_images(setup: str) -> str:
    """Returns the tables of one setup of the image benchmark."""
    rows = rows_of("images.csv", setup=setup)
    seeds = len({row["seed"] for row in rows}) or 1
    return part(f"paper.images {setup} --seeds {seeds}", rows, lambda mine: images_report.report(mine, [setup]))


def of_retrieval(table: str, show: Show) -> str:
    """Returns a table of the retrieval benchmark."""
    rows = retrieval_rows(table)
    runs = len({row["run"] for row in rows})
    return part(f"paper.retrieval --table {table} --runs {runs}", rows, show)


def of_robust(name: str, show: Show) -> str:
    """Returns a further table of the robustness benchmark."""
    return by_device(f"robust --table {name}", rows_of(f"robust_{name}.csv"), show)


ANSWERS = """\
Each row shows a query, its clean image, and the stored image that each method answered, marked by whether its class is
right. The last column shows what each pixel adds to the score of the answer of the adaptive memory, from blue, for
little, to yellow. `python -m benchmarks.search --picture LEVEL --rivals Euclid "trimmed L1" "sparse representation"`
draws these pictures."""

ANSWERED = {"faces_occlusion": 0.5, "digits_occlusion": 0.3}
"""Data set and kind of damage -> level of the drawn queries."""


def search_answers() -> str:
    """Returns the pictures of answered queries that the search benchmark has drawn."""
    pictures = []
    for name, level in ANSWERED.items():
        path, kind = PICTURES / f"search_{name}.png", search_report.KINDS[name.split("_")[1]]
        if path.exists():
            damaged = f"{name.split('_')[0]} with {100 * level:.0f} % of the {kind.removeprefix('the ')}"
            picture = f"![Queries, clean images and answers: {damaged}](pictures/{path.name})"
            pictures.append(f"{picture}\n\n*The queries are {damaged}.*")
    return "\n\n".join([ANSWERS, *pictures]) if pictures else ""


def accuracy(rows: Sequence[Row]) -> str:
    """Returns the table of retrieval accuracies."""
    return retrieval_report.level_table(rows, ["accuracy"])


def single_damage(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows with one kind of damage, of 2,048 patterns and of the systems that the page discusses."""
    kinds = ("mask", "noise", "bias")
    shown = ("M-Hop", "U-Hop", "K2-Hop", "default", "A-Hop, debias", "table alone, debias", retrieval_report.LIMIT)
    alone = [row for row in rows if sum(float(row[kind]) > 0 for kind in kinds) == 1]
    return [row for row in alone if row["patterns"] == "2048" and row["system"] in shown]


STRONGEST = ("auc", "mask 0.75", "noise 2.0", "bias 2.0")
"""The damages of bags that the page shows."""


def of_repair(rows: Sequence[Row], sets: Sequence[str]) -> str:
    """Returns the short table of some data sets of the benchmark of repair."""
    rows = [row for row in rows if row["data"] in sets]
    return by_device(f"repair --sets {' '.join(sets)}", rows, lambda mine: repair.short(mine, sets))


TABLES: dict[str, Callable[[], str]] = {
    "summary-speed": lambda: summary.speed(switching_rows(), vit_rows("eager"), rows_of("kernels.csv"), packed_rows()),
    "summary-search": lambda: summary.search(rows_of("search.csv")),
    "summary-models": lambda: summary.models(rows_of("models.csv"), rows_of("models_timm.csv")),
    "vit": lambda: by_device("vit", vit_rows("eager", "compiled"), vit_report.report),
    "vit-attention": lambda: by_device("vit --parts attention", vit_rows("attention"), vit_report.of_attention),
    "vit-memory": lambda: by_device("vit --parts memory", vit_rows("memory"), vit_report.of_memory),
    "kernels": lambda: by_device("kernels", kernel_rows(), kernels_report.report),
    "kernels-attention": lambda: by_device(
        "kernels --device cuda --only attention", attention_rows(), kernels_report.of_attention
    ),
    "blocks": lambda: by_device("kernels", on_gpus(kernel_rows()), kernels_report.of_blocks),
    "hflayers": lambda: by_device(
        "hflayers --original PATH", [row for row in switching_rows() if row["precision"] != "TF32"], hflayers.report
    ),
    "projects": lambda: by_device("projects --original PATH", rows_of("projects.csv"), projects.report),
    "projects-adaptive": lambda: by_device(
        "projects --parts adaptive", rows_of("projects_adaptive.csv"), projects_adaptive.report
    ),
    "packed": lambda: part("packed", packed_rows(), packed.report),
    "retrieval": lambda: of_retrieval("accuracy", accuracy),
    "ablations": lambda: of_retrieval("ablations", accuracy),
    "multimodal": lambda: of_retrieval("multimodal", retrieval_report.pair_table),
    "mixtures": lambda: of_retrieval("figure", lambda rows: retrieval_report.figure_table(single_damage(rows))),
    "bags": lambda: of_bags(rows_of("mil.csv"), mil_report.short_tables),
    "bags-damaged": lambda: of_bags(
        [row for row in rows_of("mil.csv") if row["measure"] in STRONGEST], mil_report.damage_table
    ),
    "images": lambda: of_images("paper"),
    "images-damaged": lambda: of_images("working"),
    "lookup-bags": lambda: by_device(
        "paper.lookup --parts bags", rows_of("lookup.csv", part="bags"), lookup_report.bag_table
    ),
    "robust": lambda: by_device("robust", rows_of("robust.csv"), robust_report.levels),
    "robust-missing": lambda: of_robust("missing", lambda rows: robust_report.missing(rows, 0.6)),
    "robust-ablation": lambda: of_robust("ablation", robust_report.ablation),
    "robust-confidence": lambda: of_robust("confidence", robust_report.confidence),
    "repair": lambda: of_repair(rows_of("repair.csv"), repair.SHOWN),
    "repair-others": lambda: of_repair(rows_of("repair.csv", kind="uniform"), repair.OTHERS),
    "images-repair": lambda: of_images("repair"),
    "search": lambda: part("search", search_rows("search.csv"), search_report.accuracy_table),
    "ar": lambda: by_device("search --data ar --file AR_42_30.mat", search_rows("ar.csv"), ar.accuracy_table),
    "search-time": lambda: by_device("search", search_rows("search.csv"), search_report.time_table),
    "search-answers": search_answers,
    "models": lambda: part("models --parts run", rows_of("models.csv"), models_report.report, "tests"),
    "search-costs": lambda: by_device("search_costs", rows_of("search_costs.csv"), search_costs.report),
    "tabular": lambda: part(
        "paper.tabular",
        rows_of("tabular.csv", settings="all rows"),
        lambda rows: tabular_report.report(rows, tabular_report.SHORT),
    ),
}
"""The tables, by the NAME of their place."""


class Picture(NamedTuple):
    """A plot: its alternative text, its rows, the function that draws it, and a caption of whole sentences."""

    alt: str
    rows: Callable[[], list[Row]]
    draw: Callable[[Sequence[Row], Path], object]
    caption: str = ""


DRAWN = {
    "robust_pairs": Picture(
        "Accuracy of a fitted memory against the number of given pairs, for faces and for digits, with lines for a fit"
        " from the damage itself and for no fit",
        lambda: rows_of("robust_pairs.csv"),
        robust_report.draw_pairs,
        "The solid line is the accuracy after a fit from pairs, by their number on a logarithmic axis, for faces (left)"
        " and digits (right). The dashed line is a fit from the damage itself, and the dotted line no fit. Points are"
        " means over the levels of damage and the splits. The accuracy axes do not start at zero.",
    ),
    "retrieval": Picture(
        "Heat map: accuracy of memories with twelve mixtures of masking, noise and bias",
        lambda: retrieval_rows("figure"),
        retrieval_report.draw,
        "Each row is a memory, and each column a mixture, with its mask, noise and bias below. The number and the"
        " color of a cell are the accuracy. The Bayes limit, below the white line, is the highest possible"
        " accuracy.",
    ),
    "search": Picture(
        "Accuracy of each method against the fraction of an image that is damaged",
        lambda: rows_of("search.csv"),
        search_report.draw_curves,
        "Each line is the accuracy of a method by the fraction of the pixels that are replaced (left) and of the"
        " area that is covered (right), for faces (top) and digits (bottom). The thick line is the adaptive memory."
        " Points are means over the splits.",
    ),
}
"""The plots, by the name of their file. The place of a plot is NAME-picture."""


def at_place(name: str) -> str:
    """Returns the content of a place: a table, or a plot if it has rows."""
    if name in TABLES:
        return TABLES[name]()
    file = name.removesuffix("-picture")
    alt, rows, _, caption = DRAWN[file]
    if not rows():
        return ""
    return f"![{alt}](pictures/{file}.svg)" + (f"\n\n*{caption}*" if caption else "")


def fill(page: str) -> str:
    """Returns the page with new content at every place."""
    return PLACE.sub(lambda place: f"{place[1]}\n{at_place(place[2])}\n{place[3]}", page)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fills all pages and draws all plots."""
    make_parser("harness.pages", __doc__).parse_args(arguments)
    for path in sorted(DOCS.glob("*.md")):
        page = path.read_text()
        places = [name for _, name, _ in PLACE.findall(page)]
        if places:
            path.write_text(fill(page))
            print(f"{path.relative_to(DOCS.parent)}: {', '.join(places)}")
    for name, picture in DRAWN.items():
        rows = picture.rows()
        if rows:
            picture.draw(rows, PICTURES / f"{name}.svg")
            print(f"plot: docs/pictures/{name}.svg")


if __name__ == "__main__":
    main()
