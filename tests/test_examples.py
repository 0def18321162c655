"""The examples run from a clean checkout and end in a table and a picture."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_retrieval(tmp_path):
    command = [sys.executable, "examples/retrieval.py", "--patterns", "60", "--steps", "25", "--out", str(tmp_path)]
    first, second = (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout for _ in range(2)
    )
    assert first == second  # the seed decides everything
    rows = dict(re.findall(r"^(dot product|adaptive) +(\d\.\d+)", first, flags=re.MULTILINE))
    assert float(rows["adaptive"]) > float(rows["dot product"])
    assert (tmp_path / "retrieval.png").stat().st_size > 10_000
