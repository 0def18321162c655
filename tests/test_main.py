"""``python -m ahop_layers`` says what runs here, and its self-test can fail."""

import subprocess
import sys

import torch

from ahop_layers import __main__ as report
from ahop_layers.ops import chunked


def test_the_command():
    done = subprocess.run([sys.executable, "-m", "ahop_layers"], capture_output=True, text=True, check=True)
    assert f"torch {torch.__version__}" in done.stdout
    assert done.stdout.count("ok: error") >= 2
    assert "devices: CPU with" in done.stdout


def test_a_wrong_or_failing_backend_shows(monkeypatch, capsys):
    right = chunked.score
    monkeypatch.setattr(chunked, "score", lambda *args: right(*args) + 1e-3)
    assert report.main() == 1
    assert "WRONG: error" in capsys.readouterr().out
    monkeypatch.setattr(chunked, "score", lambda *args: 1 / 0)
    assert report.main() == 1
    assert "FAILED: ZeroDivisionError" in capsys.readouterr().out
