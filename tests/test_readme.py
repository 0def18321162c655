"""What the README shows runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_every_python_block_runs_in_order():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 4
    namespace: dict[str, object] = {}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"README block {number}", "exec"), namespace)


def test_it_names_files_that_exist():
    table = re.findall(r"^\| (`.*?) \|", README.read_text(), flags=re.MULTILINE)
    names = [name for row in table for name in re.findall(r"`([^`]+)`", row)]
    assert names
    for name in names:
        assert (README.parent / "ahop_layers" / name).exists(), name
