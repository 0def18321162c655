"""The two-phase example runs from a clean checkout and ends in a table and a picture."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_multimodal(tmp_path):
    command = [sys.executable, "-m", "examples.multimodal", "--concepts", "40", "--steps", "15", "--queries", "100"]
    output = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    lines = re.findall(r"^(\S+-Hop) +(\S+-Hop) +(\d\.\d+)", output, flags=re.MULTILINE)
    rows = {(one, two): float(value) for one, two, value in lines}
    assert len(rows) == 5
    assert rows["A-Hop", "A-Hop"] > rows["M-Hop", "M-Hop"] + 0.2
    assert (tmp_path / "multimodal.png").stat().st_size > 10_000


def test_too_many_concepts_are_refused(tmp_path):
    command = [sys.executable, "-m", "examples.multimodal", "--concepts", "570", "--out", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert "between 1 and 569, got [570]" in result.stderr
