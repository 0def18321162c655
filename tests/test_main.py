"""``python -m ahop_layers`` reports and tests the backends, and behaves like a command-line program."""

import sys

import pytest
import torch

import ahop_layers as ah
from ahop_layers import __main__ as command
from ahop_layers.ops import chunked


def test_the_command(capsys):
    assert command.main([]) == 0
    shown = capsys.readouterr().out
    assert f"torch {torch.__version__}" in shown
    assert shown.count("ok: error") >= 2
    assert "devices: CPU with" in shown


def test_a_wrong_or_failing_backend_is_reported(monkeypatch, capsys):
    right = chunked.score
    monkeypatch.setattr(chunked, "score", lambda *args: right(*args) + 1e-3)
    assert command.main([]) == 1
    assert "WRONG: error" in capsys.readouterr().out
    monkeypatch.setattr(chunked, "score", lambda *args: 1 / 0)
    assert command.main([]) == 1
    assert "FAILED: ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.parametrize(("argument", "status", "output", "error"), [
    ("--version", 0, f"ahop-layers {ah.__version__}\n", ""),
    ("--help", 0, "usage: python -m ahop_layers", ""),
    ("backends", 2, "", "python -m ahop_layers: error: unrecognized arguments: backends\n"),
])  # fmt: skip
def test_options_are_read_from_the_command_line(argument, status, output, error, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["__main__.py", argument])
    with pytest.raises(SystemExit) as end:
        command.main()
    printed = capsys.readouterr()
    assert end.value.code == status
    assert printed.out.startswith(output)
    assert printed.err.endswith(error)
    assert bool(printed.out) == (status == 0)
