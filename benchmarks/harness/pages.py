"""Generates the tables and plots of the documentation from the rows in benchmarks/results/.

To run: python -m benchmarks.harness.pages (--help prints this text and writes nothing)

README.md or a page of docs/ marks the place of a table or plot by ``<!-- made: NAME -->`` and ``<!-- end -->``. The
command replaces the text between the two markers and leaves the rest of the page as it is. A benchmark without rows is
replaced by the command that measures it.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import hflayers, kernels_report, models_report, packed, search_costs, summary, vit, vit_report
from benchmarks.harness.command import make_parser
from benchmarks.harness.report import PICTURES, group
from benchmarks.harness.rows import RESULTS, Row, read
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

DOCS = PICTURES.parent
README = DOCS.parent / "README.md"
FILLED = (README, *sorted(DOCS.glob("*.md")))
"""The pages to fill."""
PLACE = re.compile(r"(<!-- made: ([\w-]+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)

Show = Callable[[Sequence[Row]], str]


def rows_of(file: str, **wanted: str) -> list[Row]:
    """Returns the rows of a results file that have the wanted values."""
    return [row for row in read(RESULTS / file) if wanted.items() <= row.items()]


LEVELS = ("data", "patterns", "mask", "noise", "bias", "system")
"""The columns of the retrieval benchmark whose values differ from one cell of a table to another."""


def retrieval_rows(table: str) -> list[Row]:
    """Returns the rows of one table of the retrieval benchmark, from the runs in which every system was measured.

    They are those of the device with the most rows: figures of different devices are not compared.
    """
    size, linked = retrieval.Size(), table == "multimodal"
    wanted = multimodal.measurements(size) if linked else retrieval.measurements(table, size, images=True)
    devices = group(rows_of("multimodal.csv" if linked else "retrieval.csv"), "device").values()
    found = max((retrieval.rows_of(wanted, rows) for rows in devices), key=len, default=[])
    columns = ("concepts", "system_1", "system_2") if linked else LEVELS
    cells = group(found, *columns).values()
    runs = set.intersection(*({row["run"] for row in cell} for cell in cells)) if found else set()
    return [row for row in found if row["run"] in runs]


def block_rows() -> list[Row]:
    """Returns the rows of the kernel benchmark of the devices on which block footprints were measured."""
    devices = group(rows_of("kernels.csv"), "device").values()
    return [row for rows in devices if any(map(kernels_report.has_blocks, rows)) for row in rows]


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


def of_bags(show: Callable[[mil_report.Figures, Sequence[str]], str]) -> str:
    """Returns a table of the bag benchmark."""
    rows = rows_of("mil.csv")
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

ANSWERED = {"faces_pixels": 0.8, "faces_occlusion": 0.5, "digits_pixels": 0.5, "digits_occlusion": 0.3}
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


def error(rows: Sequence[Row]) -> str:
    """Returns the table of retrieval errors, which the Bayes limits do not have."""
    return retrieval_report.level_table([row for row in rows if row["error"]], ["error"])


SHORT = ("M-Hop", "A-Hop", "A-Hop, debias", "A-Hop, debias, table", retrieval_report.LIMIT, retrieval_report.GUESSED)

TABLES: dict[str, Callable[[], str]] = {
    "summary-accuracy": lambda: summary.accuracy(
        retrieval_rows("accuracy"), rows_of("mil.csv"), rows_of("images.csv"), rows_of("tabular.csv")
    ),
    "summary-speed": lambda: summary.speed(
        vit_rows("eager"), rows_of("kernels.csv"), packed_rows(), rows_of("retrieval_timing.csv")
    ),
    "summary-search": lambda: summary.search(rows_of("search.csv"), rows_of("search_costs.csv")),
    "summary-models": lambda: summary.models(rows_of("models.csv"), rows_of("models_timm.csv")),
    "vit": lambda: by_device("vit", vit_rows("eager", "compiled"), vit_report.report),
    "vit-short": lambda: by_device("vit", vit_rows("eager", "compiled"), vit_report.short),
    "vit-attention": lambda: by_device("vit --parts attention", vit_rows("attention"), vit_report.of_attention),
    "vit-memory": lambda: by_device("vit --parts memory", vit_rows("memory"), vit_report.of_memory),
    "vit-compile": lambda: by_device("vit --parts compile-time", vit_rows("compile-time"), vit_report.of_compile_time),
    "kernels": lambda: by_device("kernels", rows_of("kernels.csv"), kernels_report.report),
    "kernels-half": lambda: by_device(
        "kernels", rows_of("kernels.csv", device="NVIDIA H200"), kernels_report.of_half_precision
    ),
    "kernels-attention": lambda: by_device(
        "kernels --device cuda --only attention", attention_rows(), kernels_report.of_attention
    ),
    "blocks": lambda: by_device("kernels", block_rows(), kernels_report.of_blocks),
    "throughput": lambda: of_images("throughput"),
    "timing": lambda: by_device(
        "paper.retrieval --table timing", rows_of("retrieval_timing.csv"), retrieval_report.timing_table
    ),
    "hflayers": lambda: by_device("hflayers --original PATH", rows_of("hflayers.csv"), hflayers.report),
    "projects": lambda: by_device("projects --original PATH", rows_of("projects.csv"), projects.report),
    "projects-adaptive": lambda: by_device(
        "projects --parts adaptive", rows_of("projects_adaptive.csv"), projects_adaptive.report
    ),
    "packed": lambda: part("packed", packed_rows(), packed.report),
    "retrieval": lambda: of_retrieval("accuracy", accuracy),
    "retrieval-short": lambda: of_retrieval(
        "accuracy", lambda rows: accuracy([row for row in rows if row["system"] in SHORT])
    ),
    "retrieval-error": lambda: of_retrieval("accuracy", error),
    "ablations": lambda: of_retrieval("ablations", accuracy),
    "multimodal": lambda: of_retrieval("multimodal", retrieval_report.pair_table),
    "mixtures": lambda: of_retrieval("figure", retrieval_report.figure_table),
    "bags": lambda: of_bags(mil_report.short_tables),
    "bags-damaged": lambda: of_bags(mil_report.damage_table),
    "images": lambda: of_images("paper"),
    "images-damaged": lambda: of_images("working"),
    "lookup-faces": lambda: by_device(
        "paper.lookup --parts faces", rows_of("lookup.csv", part="faces"), lookup_report.face_table
    ),
    "lookup-bags": lambda: by_device(
        "paper.lookup --parts bags", rows_of("lookup.csv", part="bags"), lookup_report.bag_table
    ),
    "robust": lambda: by_device("robust", rows_of("robust.csv"), robust_report.levels),
    "robust-missing": lambda: of_robust("missing", robust_report.missing),
    "robust-pairs": lambda: of_robust("pairs", robust_report.pairs),
    "robust-ablation": lambda: of_robust("ablation", robust_report.ablation),
    "robust-scale": lambda: of_robust("scale", robust_report.scale),
    "robust-confidence": lambda: of_robust("confidence", robust_report.confidence),
    "search": lambda: part("search", rows_of("search.csv"), search_report.accuracy_table),
    "ar": lambda: by_device("search --data ar --file AR_42_30.mat", rows_of("ar.csv"), ar.accuracy_table),
    "search-time": lambda: by_device("search", rows_of("search.csv"), search_report.time_table),
    "search-answers": search_answers,
    "models": lambda: part("models --parts run", rows_of("models.csv"), models_report.report, "tests"),
    "models-names": lambda: part("models --parts count", rows_of("models_timm.csv"), models_report.of_names, "tests"),
    "search-costs": lambda: by_device("search_costs", rows_of("search_costs.csv"), search_costs.report),
    "tabular": lambda: part("paper.tabular", rows_of("tabular.csv"), tabular_report.report),
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
    "kernels": Picture(
        "Bar chart: speedup over plain PyTorch for each problem size, forward and forward + backward",
        lambda: rows_of("kernels.csv"),
        kernels_report.draw,
        "Each pair of bars is the speedup over plain PyTorch for one problem size, on a logarithmic axis: forward"
        " above, forward + backward below. At the vertical line, both are equally fast.",
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
    "mil": Picture(
        "AUC of seven poolings against the strength of masking, noise and bias",
        lambda: rows_of("mil.csv"),
        mil_report.draw,
        "Each line is the test AUC of a pooling by the strength of the damage, the mean over the data sets. In"
        " the upper row only test bags are damaged, in the lower row all bags. Points of one strength are shifted"
        " sideways so that they do not overlap. The AUC axis does not start at zero.",
    ),
    "images": Picture(
        "Test accuracy of a ViT against the strength of noise, masking and color bias",
        lambda: rows_of("images.csv", setup="working"),
        images_report.draw,
        "Each line is the test accuracy of an attention by the strength of the damage. Points are means over"
        " the seeds, and bars reach from the lowest to the highest seed. Points of one strength are shifted"
        " sideways so that they do not overlap.",
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


WRAPPED = ("models", "projects", "summary-accuracy", "summary-models", "summary-search", "summary-speed")
"""The tables with long texts, whose cells may have several lines."""


def fill(page: str, wide: bool = True) -> str:
    """Returns the page with new content at every place, in a ``div`` of the site's own class if ``wide``."""

    def content(place: re.Match[str]) -> str:
        kind = "wide wrap" if place[2] in WRAPPED else "wide"
        start, end = (f'<div class="{kind}" markdown>\n\n', "\n</div>\n") if wide else ("\n", "\n")
        return f"{place[1]}{start}{at_place(place[2])}\n{end}{place[3]}"

    return PLACE.sub(content, page)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fills all pages and draws all plots."""
    make_parser("harness.pages", __doc__).parse_args(arguments)
    for path in FILLED:
        page = path.read_text()
        places = [name for _, name, _ in PLACE.findall(page)]
        if places:
            path.write_text(fill(page, wide=path != README))
            print(f"{path.relative_to(DOCS.parent)}: {', '.join(places)}")
    for name, picture in DRAWN.items():
        rows = picture.rows()
        if rows:
            picture.draw(rows, PICTURES / f"{name}.svg")
            print(f"plot: docs/pictures/{name}.svg")


if __name__ == "__main__":
    main()
