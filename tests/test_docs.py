"""Every Python block of README and guides runs as it stands, in order."""

import re
from pathlib import Path

import pytest
from frameworks import framework

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_runs_in_order(page):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert blocks
    for name in ("timm", "torchvision", "transformers"):
        if re.search(rf"^(import|from) {name}", "\n".join(blocks), flags=re.MULTILINE):
            framework(name)
    namespace: dict[str, object] = {}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{page.name} block {number}", "exec"), namespace)


def test_the_readme_names_files_that_exist():
    table = re.findall(r"^\| (`.*?) \|", PAGES[0].read_text(), flags=re.MULTILINE)
    names = [name for row in table for name in re.findall(r"`([^`]+)`", row)]
    assert names
    for name in names:
        assert (ROOT / "ahop_layers" / name).exists(), name
