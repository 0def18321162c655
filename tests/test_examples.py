"""The command line that all examples share, and the examples of memories."""

import argparse
import errno
import json
import os
import re
import resource
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import accelerators
from matplotlib.colors import to_rgba
from sklearn.model_selection import StratifiedKFold

from ahop_layers import AHopError
from examples import demo, mil, multimodal, retrieval, search, tabular, vit
from examples.common import checkpoints, cli, outputs, training

ROOT = Path(__file__).parents[1]
EXAMPLES = {
    module.__name__.rpartition(".")[2]: module for module in (demo, mil, multimodal, retrieval, search, tabular, vit)
}
UNKNOWN = "argument --config: run.yaml: expected options of multimodal, got"
SMALL = ["--patterns", "20", "--epochs", "1"]

pytestmark = pytest.mark.slow


def test_retrieval(tmp_path, capsys):
    tables = []
    for folder in ("first", "second"):
        found = retrieval.main(["--patterns", "60", "--epochs", "10", "--out", str(tmp_path / folder)])
        tables.append(capsys.readouterr().out.replace(folder, ""))
    assert tables[0] == tables[1]  # the seed determines the result
    assert re.search(rf"^adaptive +{found['adaptive']:.3f}", tables[0], flags=re.MULTILINE)
    assert found["adaptive"] > found["dot product"]
    assert (tmp_path / "first" / "retrieval.png").stat().st_size > 10_000


def test_search(tmp_path, capsys):
    arguments = ["--patterns", "100", "--epochs", "60", "--seeds", "2", "--out", str(tmp_path)]
    found = search.main(arguments)
    shown = capsys.readouterr().out
    for level in search.LEVELS:
        assert re.search(rf"^{level:.0%} +0\.\d+ ± 0\.\d+", shown, flags=re.MULTILINE)
        assert [len(values[level]) for values in found.values()] == [2, 2, 2]
    assert min(found["adaptive"][0.7]) > max(found["L1"][0.7])
    assert (tmp_path / "search.png").stat().st_size > 10_000


def test_answers_are_marked_as_right_or_wrong():
    rows = {name: torch.zeros(2, 1) for name in ("query", "answer")}
    drawn = outputs.draw_rows(rows, lambda axis, _: axis.plot([0]), 1, 1, {"answer": torch.tensor([True, False])})
    signs = [[text.get_text() for text in axis.texts] for axis in drawn.axes]
    assert signs == [[], [], ["\u2713"], ["\u2717"]]
    colors = [axis.spines["left"].get_edgecolor() for axis in drawn.axes[2:]]
    assert colors == [to_rgba(outputs.answer_style(right)[0]) for right in (True, False)]
    assert [axis.spines["left"].get_visible() for axis in drawn.axes] == [False, False, True, True]
    assert [axis.get_ylabel() for axis in drawn.axes] == ["query", "", "answer", ""]


def test_tabular(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tabular, "StratifiedKFold", lambda _, **keywords: StratifiedKFold(2, **keywords))
    accuracy = tabular.main(["--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert {"adaptive memory", "gradient boosting"} <= set(accuracy)
    assert all(f"{name:<22}{value:>10.3f}" in shown for name, value in accuracy.items())
    assert min(accuracy.values()) > 0.8
    assert (tmp_path / "cases.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("example", "size", "row"),
    [
        (retrieval, SMALL, r"^adaptive +\d\.\d+"),
        (search, [*SMALL, "--seeds", "1"], r"^70% +\d\.\d+"),
        (multimodal, ["--concepts", "10", "--steps", "1", "--queries", "20"], r"^A-Hop +A-Hop +\d\.\d+"),
    ],
    ids=["retrieval", "search", "multimodal"],
)
def test_the_table_is_shown_even_if_the_picture_cannot_be_written(example, size, row, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(example, "write_figure", fail)
    with pytest.raises(SystemExit) as stopped:
        example.main([*size, "--out", str(tmp_path)])
    shown = capsys.readouterr()
    assert stopped.value.code == 2
    assert re.search(row, shown.out, flags=re.MULTILINE)
    assert shown.err.endswith("error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("vit", ["--epochs", "0"], "--epochs: expected a positive integer, got '0'"),
        ("mil", ["--epochs", "-3"], "--epochs: expected a positive integer, got '-3'"),
        ("vit", ["--epochs", "1.5"], "--epochs: expected a positive integer, got '1.5'"),
        ("retrieval", ["--steps", "0"], "--epochs/--steps: expected a positive integer, got '0'"),
        ("vit", ["--lr", "-1"], "--lr: expected a positive number, got '-1'"),
        ("mil", ["--lr", "nan"], "--lr: expected a positive number, got 'nan'"),
        ("vit", ["--lr", "inf"], "--lr: expected a positive number, got 'inf'"),
        ("retrieval", ["--lr", "fast"], "--lr: expected a positive number, got 'fast'"),
        ("vit", ["--batch-size", "0"], "--batch-size: expected a positive integer, got '0'"),
        ("mil", ["--batch-size", "-2"], "--batch-size: expected a positive integer, got '-2'"),
        ("vit", ["--patch", "0"], "--patch: expected a positive integer, got '0'"),
        ("vit", ["--save-every", "0"], "--save-every: expected a positive integer, got '0'"),
        ("vit", ["--similarity-lr", "-1"], "--similarity-lr: expected a non-negative number, got '-1'"),
        ("mil", ["--dropout", "1.5"], "--dropout: expected a number from 0 to 1, got '1.5'"),
        ("mil", ["--heads", "0"], "--heads: expected a positive integer, got '0'"),
        ("mil", ["--workers", "-1"], "--workers: expected a non-negative integer, got '-1'"),
        ("vit", ["--patience", "0"], "--patience: expected a positive integer, got '0'"),
        ("demo", ["--seed", "-1"], "--seed: expected an integer from 0 to 4294967295, got '-1'"),
        ("retrieval", ["--difficulty", "3"], "--difficulty: expected a number from 0 to 1, got '3'"),
        ("retrieval", ["--patterns", "1798"], "--patterns: expected an integer from 1 to 1797, got '1798'"),
        ("multimodal", ["--concepts", "10", "570"], "--concepts: expected an integer from 1 to 569, got '570'"),
    ],
)  # fmt: skip
def test_an_invalid_value_is_named(name, arguments, message, tmp_path, refused):
    last = refused(EXAMPLES[name].main, *arguments, "--out", tmp_path / "out")
    assert last == f"{name}: error: argument {message}"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("vit", ["--accelerator", "gpu"], "got --accelerator gpu --devices 1 .*: No supported gpu backend found!"),
        ("mil", ["--accelerator", "gpu"], "got --accelerator gpu: No supported gpu backend found!"),
        ("mil", ["--accelerator", "abacus"], "got --accelerator abacus: You selected an invalid accelerator name"),
        ("vit", ["--devices", "none"], "got --accelerator auto --devices none .*should be an int"),
        ("vit", ["--precision", "3"], r"--precision 3: Precision '3' is invalid"),
    ],
)
def test_hardware_that_is_missing_is_named(name, arguments, message, tmp_path, monkeypatch, refused):
    for kind in (accelerators.CUDAAccelerator, accelerators.MPSAccelerator):
        monkeypatch.setattr(kind, "is_available", staticmethod(lambda: False))
    last = refused(EXAMPLES[name].main, *arguments, "--out", tmp_path / "out")
    assert last.startswith(f"{name}: error: expected options that this machine supports, got --accelerator ")
    assert re.search(message, last)
    assert not (tmp_path / "out").exists()


def test_every_example_has_the_shared_options_with_the_same_help():
    helps = {name: {} for name in cli.SHARED}
    for example in EXAMPLES.values():
        options = {action.dest: action for action in example.make_parser()._actions}
        assert {"seed", "out", "overwrite", "config"} <= set(options)
        for name in set(options) & set(helps):
            helps[name].setdefault(options[name].help.removesuffix(" (default: %(default)s)"), []).append(example)
    assert all(len(texts) == 1 for texts in helps.values()), helps


def commands(page: Path) -> list[list[str]]:
    """Returns the commands of a page that run an example, as its name and arguments."""
    found = re.findall(r"(?:`|^)python -m examples\.([^`\n]+)", page.read_text(), flags=re.MULTILINE)
    return [shlex.split(command) for command in found]


@pytest.mark.parametrize(
    "page", [ROOT / "examples" / "README.md", ROOT / "docs" / "gallery.md"], ids=lambda page: page.name
)
def test_commands_of_the_index_and_the_gallery_are_valid(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = commands(page)
    assert {name for name, *_ in found} >= set(EXAMPLES) - {"demo"}
    for name, *arguments in found:
        EXAMPLES[name].make_parser().parse_args(arguments)


def test_the_index_has_every_script_and_its_options():
    text = (ROOT / "examples" / "README.md").read_text()
    scripts = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"__init__"}
    assert set(re.findall(r"^\| \[(\w+)\.py\]", text, flags=re.MULTILINE)) == scripts == set(EXAMPLES)
    header, _, *lines = re.findall(r"^\| (?:option|---|`--).*\|$", text.partition("## Options")[2], flags=re.MULTILINE)
    names = [cell.strip() for cell in header.strip("|").split("|")][1:]
    has = {name: {action.dest for action in EXAMPLES[name].make_parser()._actions} for name in names}
    table = {}
    for line in lines:
        option, *cells = (cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|"))
        table[option.strip("`").split()[0].strip("-").replace("-", "_")] = [cell == "\u2713" for cell in cells]
    assert table == {option: [option in has[name] for name in names] for option in cli.SHARED}
    config = re.search(r"```yaml\n(.*?)```", text, flags=re.DOTALL)[1]
    assert {name.replace("-", "_") for name in yaml.safe_load(config)} <= has["vit"]


def test_scripts_run_and_modules_do_not():
    paths = {path: path.read_text() for path in (ROOT / "examples").rglob("*.py") if path.name != "__init__.py"}
    scripts = {path for path, text in paths.items() if '__name__ == "__main__"' in text}
    assert scripts == {path for path in paths if path.parent == ROOT / "examples"}


def test_pictures_of_the_gallery_are_small():
    names = re.findall(r"\]\((pictures/[^)]+)\)", (ROOT / "docs" / "gallery.md").read_text())
    sizes = {name: (ROOT / "docs" / name).stat().st_size for name in names}
    assert len(sizes) == 7
    assert max(sizes.values()) < 150_000, sizes


def test_a_command_ends_with_status_2_and_without_a_traceback(tmp_path):
    command = [sys.executable, "-m", "examples.retrieval", "--difficulty", "nan", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: retrieval [-h]")
    last = "retrieval: error: argument --difficulty: expected a number from 0 to 1, got 'nan'"
    assert done.stderr.splitlines()[-1] == last


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_folder_that_cannot_be_written_to_is_named_at_once(name, tmp_path, monkeypatch, refused):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    monkeypatch.setattr(sys, "argv", [name, "--out", str(out)])
    last = refused(lambda _: runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__"))
    reason = f"expected a folder to write to, got {out}: {tmp_path / 'file'} is not a folder"
    assert last == f"{name}: error: argument --out: {reason}"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="there is no /proc")
def test_a_folder_that_not_even_root_can_create_is_named(refused):
    last = refused(retrieval.main, "--out", "/proc/x")
    assert last.startswith("retrieval: error: argument --out: expected a folder to write to, got /proc/x: /proc is not")


def test_a_folder_to_write_to_is_not_created_yet(tmp_path, monkeypatch):
    deep = tmp_path / "a" / "b"
    assert cli.output_folder(str(deep)) == deep
    assert not list(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    assert cli.output_folder("out") == Path("out")

    def fail(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "mkdir", fail)
    with pytest.raises(argparse.ArgumentTypeError, match=rf"{tmp_path} is not writable \(Permission denied\)"):
        cli.output_folder(str(deep))


def test_a_second_run_needs_overwrite(tmp_path, monkeypatch, refused):
    run = [*SMALL, "--out", str(tmp_path)]
    monkeypatch.setattr(retrieval, "write_figure", lambda path, _: path.write_text(f"run {len(calls)}"))
    monkeypatch.setattr(retrieval, "draw_rows", lambda *_: calls.append(None))
    calls = []
    retrieval.main(run)
    picture, record = tmp_path / "retrieval.png", tmp_path / cli.RECORD
    before = picture.read_bytes()
    last = refused(retrieval.main, *run, "--seed", "1")
    found = "options.json, retrieval.png (use --overwrite to replace it)"
    reason = f"expected a folder without an earlier run, got {tmp_path} with {found}"
    assert last == f"retrieval: error: argument --out: {reason}"
    assert picture.read_bytes() == before
    (tmp_path / "notes.txt").touch()
    retrieval.main([*run, "--seed", "1", "--overwrite"])
    assert picture.read_bytes() != before
    assert json.loads(record.read_text())["seed"] == 1
    assert (tmp_path / "notes.txt").exists()  # files of others are kept
    record.unlink()
    assert "with retrieval.png (use" in refused(retrieval.main, *run)


def test_a_run_that_starts_at_the_same_time_is_refused(tmp_path, capsys):
    parser = retrieval.make_parser()
    first, second = (parser.parse_args(["--out", str(tmp_path)]) for _ in range(2))
    parser.start(first)
    with pytest.raises(SystemExit), parser.one_line_errors():
        parser.start(second)
    assert capsys.readouterr().err.endswith(f"File exists: '{tmp_path / cli.RECORD}'\n")


def test_other_processes_of_a_distributed_run_share_its_folder(tmp_path, monkeypatch):
    parser = vit.make_parser()
    parser.start(parser.parse_args(["--out", str(tmp_path)]))
    before = (tmp_path / cli.RECORD).stat().st_mtime_ns
    monkeypatch.setenv("LOCAL_RANK", "1")
    options = parser.parse_args(["--out", str(tmp_path), "--overwrite"])
    parser.start(parser.parse_args(["--out", str(tmp_path)]))
    parser.start(options)
    assert (tmp_path / cli.RECORD).stat().st_mtime_ns == before


def test_a_file_holds_defaults_for_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("epochs: 7\nlr: 1e-4\naugment: true\nfast-dev-run: false\ndevices: [2]\nmodel: tiny\n")
    options = vit.make_parser().parse_args(["--config", "run.yaml", "--epochs", "3"])
    assert (options.epochs, options.lr, options.model, options.devices) == (3, 1e-4, "tiny", "2")
    assert options.augment
    assert not options.fast_dev_run
    vit.make_parser().start(options)
    again = vit.make_parser().parse_args(["--config", f"{options.out / cli.RECORD}", "--out", "other"])
    left = {"config", "out"}
    assert {name: value for name, value in vars(again).items() if name not in left} == {
        name: value for name, value in vars(options).items() if name not in left
    }
    Path("run.json").write_text('{"concepts": [10, 20], "steps": 5}')
    options = multimodal.make_parser().parse_args(["--config", "run.json"])
    assert (options.concepts, options.epochs) == ([10, 20], 5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"epochs: 0\n", "argument --epochs/--steps: expected a positive integer, got '0'"),
        (b"epoch: 1\n", f"{UNKNOWN} epoch: 1"),
        (b"config: other.yaml\n", f"{UNKNOWN} config: other.yaml"),
        (b"epochs:\n  most: 3\n", f"{UNKNOWN} epochs: {{'most': 3}}"),
        (b"concepts: [10, many]\n", "argument --concepts: expected an integer from 1 to 569, got 'many'"),
        (b"- epochs\n", "argument --config: expected a mapping of options to values, got run.yaml"),
        (b"epochs: [\n", "argument --config: expected a YAML or JSON file, got run.yaml: while parsing"),
        (b"\xff\xfe\xfa", "argument --config: expected a YAML or JSON file, got run.yaml: 'utf-8' codec"),
        (None, "argument --config: expected a YAML or JSON file, got run.yaml: [Errno 2] No such file"),
    ],
)
def test_a_file_of_defaults_that_does_not_fit_is_named(content, message, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("run.yaml").write_bytes(content)
    assert refused(multimodal.main, "--config", "run.yaml").startswith(f"multimodal: error: {message}")
    assert not Path("out").exists()


def test_a_full_disk_leaves_the_previous_checkpoint_and_no_part(tmp_path):
    path, writer = tmp_path / "last.ckpt", checkpoints.AtomicCheckpoints()
    held = {"state_dict": {}, "hyper_parameters": {}}
    writer.save_checkpoint(held, path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 1000, hard))  # a write beyond it fails halfway
    try:
        with pytest.raises(OSError, match="File too large"):
            writer.save_checkpoint({**held, "state_dict": {"weight": torch.rand(5000)}}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]
    assert torch.load(path, weights_only=True) == held


def test_a_logger_that_is_not_installed_is_named(tmp_path, monkeypatch):
    assert type(training.make_logger("csv", tmp_path)).__name__ == "CSVLogger"

    def missing(*_, **__):
        raise ModuleNotFoundError("neither tensorboard nor tensorboardX")

    monkeypatch.setattr(training, "TensorBoardLogger", missing)
    with pytest.raises(AHopError, match=r"^argument --logger: expected the package tensorboard or tensorboardX"):
        training.make_logger("tensorboard", tmp_path)


def test_tensorboard_is_used_where_it_is_installed(tmp_path):
    pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed")
    assert type(training.make_logger("tensorboard", tmp_path)).__name__ == "TensorBoardLogger"
