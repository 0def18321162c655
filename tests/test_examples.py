"""The examples run from a clean checkout and end in a table and a picture, and say at once where they cannot write."""

import argparse
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from examples import multimodal, retrieval
from examples.common import outputs

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


def test_retrieval(tmp_path):
    command = [sys.executable, "-m", "examples.retrieval", "--patterns", "60", "--steps", "25", "--out", str(tmp_path)]
    first, second = (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout for _ in range(2)
    )
    assert first == second  # the seed decides everything
    rows = dict(re.findall(r"^(dot product|adaptive) +(\d\.\d+)", first, flags=re.MULTILINE))
    assert float(rows["adaptive"]) > float(rows["dot product"])
    assert (tmp_path / "retrieval.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("example", "size", "row"),
    [
        (retrieval, ["--patterns", "20", "--steps", "1"], r"^adaptive +\d\.\d+"),
        (multimodal, ["--concepts", "10", "--steps", "1", "--queries", "20"], r"^A-Hop +A-Hop +\d\.\d+"),
    ],
    ids=["retrieval", "multimodal"],
)
def test_the_table_is_shown_even_if_no_picture_can_be_drawn(example, size, row, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(example, "save_picture", fail)
    monkeypatch.setattr(sys, "argv", [example.__file__, *size, "--out", str(tmp_path)])
    with pytest.raises(OSError, match="no space left"):
        example.main()
    assert re.search(row, capsys.readouterr().out, flags=re.MULTILINE)


@pytest.mark.parametrize("name", ["demo", "mil", "multimodal", "retrieval", "tabular", "vit"])
def test_a_folder_that_cannot_be_written_to_is_named_at_once(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    monkeypatch.setattr(sys, "argv", [name, "--out", str(out)])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"expected a folder to write to, got {out}: {tmp_path / 'file'} is no folder")


def test_a_folder_to_write_to_is_not_made_yet(tmp_path, monkeypatch):
    deep = tmp_path / "a" / "b"
    assert outputs.output_folder(str(deep)) == deep
    assert not deep.parent.exists()
    monkeypatch.chdir(tmp_path)
    assert outputs.output_folder("out") == Path("out")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(argparse.ArgumentTypeError, match=f"{tmp_path} cannot be written to"):
        outputs.output_folder(str(deep))
