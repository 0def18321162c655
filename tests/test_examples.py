"""The command line that all examples share, and the examples of memories."""

import errno
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import accelerators

from examples import demo, mil, multimodal, retrieval, search, tokens, vit
from examples.common import command, outputs, training

ROOT = Path(__file__).parents[1]
EXAMPLES = {
    module.__name__.rpartition(".")[2]: module for module in (demo, mil, multimodal, retrieval, search, tokens, vit)
}
SMALL = ["--patterns", "20", "--epochs", "1"]

pytestmark = pytest.mark.slow


def drawing_as_text(rows, *_):
    """Stands for a figure, which takes seconds to draw."""
    return SimpleNamespace(savefig=lambda path, dpi: path.write_text(str(rows)))


@pytest.mark.full
def test_retrieval(tmp_path, monkeypatch, capsys):
    tables = []
    for folder in ("first", "second"):
        found = retrieval.main(["--patterns", "60", "--epochs", "10", "--out", str(tmp_path / folder)])
        tables.append(capsys.readouterr().out.replace(folder, ""))
        monkeypatch.setattr(retrieval, "draw_rows", drawing_as_text)
    assert tables[0] == tables[1]  # the seed determines the result
    assert re.search(rf"^adaptive +{found['adaptive']:.3f}", tables[0], flags=re.MULTILINE)
    assert found["adaptive"] > found["dot product"]
    assert (tmp_path / "first" / "retrieval.png").stat().st_size > 10_000


def test_search(tmp_path, capsys, monkeypatch, small_fit):
    monkeypatch.setattr(search, "LEVELS", (0.5, 0.7))
    found = search.main(["--patterns", "100", "--seeds", "2", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    for level in search.LEVELS:
        assert re.search(rf"^{level:.0%} +[01]\.\d+ ± 0\.\d+", shown, flags=re.MULTILINE)
        assert [len(values[level]) for values in found.values()] == [2, 2, 2]
    assert min(found["adaptive"][0.7]) > 0.95 > 0.8 > max(found["L1"][0.7])
    assert (tmp_path / "search.png").stat().st_size > 10_000


def test_tokens(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tokens, "LEVELS", (0.0, 0.4))
    found = tokens.main(["--epochs", "1", "--seeds", "1", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert re.search(rf"^40% .* {found['learned ranks'][0.4][0]:.3f}$", shown, flags=re.MULTILINE)
    assert found["learned ranks"][0.4][0] > found["not sorted"][0.4][0] > found["embedding"][0.4][0]
    assert (tmp_path / "tokens.png").stat().st_size > 10_000


def test_answers_are_marked_as_right_or_wrong():
    rows = {name: torch.zeros(2, 1) for name in ("query", "answer")}
    drawn = outputs.draw_rows(rows, lambda axis, _: axis.plot([0]), 1, 1, {"answer": torch.tensor([True, False])})
    signs = [[text.get_text() for text in axis.texts] for axis in drawn.axes]
    assert signs == [[], [], ["\u2713"], ["\u2717"]]


def test_the_table_is_shown_even_if_the_picture_cannot_be_written(tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(multimodal, "draw_rows", fail)
    with pytest.raises(SystemExit) as stopped:
        multimodal.main(["--concepts", "10", "--epochs", "1", "--queries", "20", "--out", str(tmp_path)])
    shown = capsys.readouterr()
    assert stopped.value.code == 2
    assert re.search(r"^A-Hop +A-Hop +\d\.\d+", shown.out, flags=re.MULTILINE)
    assert shown.err.endswith("error: [Errno 28] No space left on device\n")


def test_multimodal(tmp_path, capsys):
    size = ["--concepts", "40", "--epochs", "15", "--queries", "100"]
    accuracy = multimodal.main([*size, "--out", str(tmp_path)])
    assert list(accuracy) == multimodal.PAIRS
    assert accuracy["A-Hop", "A-Hop"][0] > accuracy["M-Hop", "M-Hop"][0] + 0.2
    shown = capsys.readouterr().out.splitlines()
    for (one, two), (value,) in accuracy.items():
        assert f"{one:<10}{two:<10}{value:>10.3f}" in shown
    assert (tmp_path / "multimodal.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("vit", ["--epochs", "0"], "argument --epochs: expected an integer >= 1, got '0'"),
        ("mil", ["--lr", "nan"], "argument --lr: expected a number >= 0, got 'nan'"),
        ("mil", ["--dropout", "1.5"], "argument --dropout: expected a number from 0 to 1, got '1.5'"),
        ("demo", ["--seed", "-1"], "argument --seed: expected an integer from 0 to 4294967295, got '-1'"),
        ("search", ["--patterns", "many"], "argument --patterns: expected an integer from 20 to 1797, got 'many'"),
        ("multimodal", ["--concepts", "9", "570"], "argument --concepts: expected an integer from 1 to 569, got '570'"),
        ("retrieval", ["--epoch", "1"], "unrecognized arguments: --epoch 1"),  # no abbreviations
        ("retrieval", ["@missing"], "[Errno 2] No such file or directory: 'missing'"),
    ],
)  # fmt: skip
def test_an_invalid_argument_is_named(name, arguments, message, tmp_path, refused):
    last = refused(EXAMPLES[name].main, *arguments, "--out", tmp_path / "out")
    assert last in (f"{name}: error: {message}", f"{name}: error: can't open 'missing': {message}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "arguments", "message"), [
    ("mil", ["--accelerator", "gpu"], "No supported gpu backend found!"),
    ("vit", ["--precision", "3"], "Precision '3' is invalid"),
    ("vit", ["--logger", "tensorboard"], "neither tensorboard nor tensorboardX"),
])  # fmt: skip
def test_what_this_machine_does_not_have_is_named(name, arguments, message, tmp_path, monkeypatch, refused):
    def missing(*_, **__):
        raise ModuleNotFoundError("neither tensorboard nor tensorboardX")

    monkeypatch.setattr(training, "TensorBoardLogger", missing)
    for kind in (accelerators.CUDAAccelerator, accelerators.MPSAccelerator):
        monkeypatch.setattr(kind, "is_available", staticmethod(lambda: False))
    last = refused(EXAMPLES[name].main, *arguments, "--out", tmp_path / "out")
    assert last.startswith(f"{name}: error: expected options that this machine supports, got: ")
    assert message in last
    assert not (tmp_path / "out").exists()


def test_commands_of_the_index_and_the_gallery_are_valid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.txt").write_text("--model=tiny\n")
    for page in (ROOT / "examples" / "README.md", ROOT / "docs" / "gallery.md"):
        found = re.findall(r"(?:`|^)python -m examples\.([^`\n]+)", page.read_text(), flags=re.MULTILINE)
        assert {shlex.split(line)[0] for line in found} >= set(EXAMPLES) - {"demo"}
        for name, *arguments in (shlex.split(line) for line in found if not line.startswith("serve ")):
            EXAMPLES[name].make_parser().parse_args(arguments)


SCRIPTS = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"__init__", "serve"}


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_every_script_runs_and_has_the_common_options(name, monkeypatch, refused):
    assert {"--seed", "--out", "--overwrite"} <= set(EXAMPLES[name].make_parser()._option_string_actions)
    monkeypatch.setattr(sys, "argv", [name, "--seed", "x"])
    last = refused(lambda _: runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__"))
    assert last.startswith(f"{name}: error: argument --seed: ")


def test_a_folder_that_cannot_be_written_to_is_named_at_once(tmp_path, refused):
    (tmp_path / "file").touch()
    last = refused(retrieval.main, "--out", tmp_path / "file" / "out")
    assert last == f"retrieval: error: [Errno 20] Not a directory: '{tmp_path / 'file' / 'out'}'"


def test_a_second_run_needs_overwrite(tmp_path, monkeypatch, refused):
    monkeypatch.setattr(retrieval, "draw_rows", drawing_as_text)
    run = [*SMALL, "--out", str(tmp_path)]
    retrieval.main(run)
    picture, record = tmp_path / "retrieval.png", tmp_path / command.RECORD
    before = picture.read_bytes()
    last = refused(retrieval.main, *run, "--seed", "1")
    found = "options.txt, retrieval.png (use --overwrite to replace it)"
    reason = f"expected a folder without an earlier run, got {tmp_path} with {found}"
    assert last == f"retrieval: error: argument --out: {reason}"
    assert picture.read_bytes() == before
    (tmp_path / "notes.txt").touch()
    retrieval.main([*run, "--seed", "1", "--overwrite"])
    assert picture.read_bytes() != before
    assert "--seed\n1\n" in record.read_text()
    assert (tmp_path / "notes.txt").exists()  # files of others are kept


def test_a_run_that_starts_at_the_same_time_is_refused(tmp_path, capsys):
    parser = retrieval.make_parser()
    first, second = (parser.parse_args(["--out", str(tmp_path)]) for _ in range(2))
    parser.start(first)
    with pytest.raises(SystemExit), parser.one_line_errors():
        parser.start(second)
    assert capsys.readouterr().err.endswith(f"File exists: '{tmp_path / command.RECORD}'\n")


def test_other_processes_of_a_distributed_run_share_its_folder(tmp_path, monkeypatch):
    parser = vit.make_parser()
    parser.start(parser.parse_args(["--out", str(tmp_path)]))
    before = (tmp_path / command.RECORD).stat().st_mtime_ns
    monkeypatch.setenv("LOCAL_RANK", "1")
    for more in ([], ["--overwrite"]):
        parser.start(parser.parse_args(["--out", str(tmp_path), *more]))
    assert (tmp_path / command.RECORD).stat().st_mtime_ns == before


def test_the_recorded_arguments_repeat_a_run(tmp_path):
    parser = vit.make_parser()
    arguments = ["--augment", "--lr", "1e-4", "--model", "tiny", "--devices", "0,1", "--patch", "2"]
    options = parser.parse_args([*arguments, "--out", str(tmp_path / "first")])
    parser.start(options)
    record = tmp_path / "first" / command.RECORD
    again = parser.parse_args([f"@{record}", "--seed", "1", "--out", str(tmp_path / "second")])
    assert vars(again) == {**vars(options), "seed": 1, "out": tmp_path / "second"}


def test_tensorboard_is_used_where_it_is_installed(tmp_path):
    pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed")
    options = vit.make_parser().parse_args(["--logger", "tensorboard", "--accelerator", "cpu", "--out", str(tmp_path)])
    assert type(training.make_trainer(options, "val_loss", "min").logger).__name__ == "TensorBoardLogger"
