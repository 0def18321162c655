"""The two-phase example: a table and a picture, and the adaptive memories ahead."""

import pytest

from examples import multimodal

pytestmark = pytest.mark.slow


def test_multimodal(tmp_path, capsys):
    size = ["--concepts", "40", "--epochs", "15", "--queries", "100"]
    accuracy = multimodal.main([*size, "--out", str(tmp_path)])
    assert list(accuracy) == multimodal.PAIRS
    assert accuracy["A-Hop", "A-Hop"][0] > accuracy["M-Hop", "M-Hop"][0] + 0.2
    shown = capsys.readouterr().out.splitlines()
    for (one, two), (value,) in accuracy.items():
        assert f"{one:<10}{two:<10}{value:>10.3f}" in shown
    assert (tmp_path / "multimodal.png").stat().st_size > 10_000
