"""The option ``--seed-offset`` of the suite."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import seed_offset

CODE = """
import random, subprocess, sys
import numpy as np, seed_offset, torch

def draws(seed):
    torch.manual_seed(seed)
    return [torch.rand(1).item(), torch.rand(1, generator=torch.Generator().manual_seed(seed)).item(),
            np.random.default_rng(seed).random(), np.random.RandomState(seed).rand(), random.Random(seed).random()]

expected = draws(5)
seed_offset.install(3)
seed_offset.install(3)  # a second time changes nothing
assert draws(2) == expected
assert isinstance(torch.default_generator, torch.Generator)
child = "import torch; print(torch.rand(1, generator=torch.Generator().manual_seed(2)).item())"
child = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
assert float(child.stdout) == expected[1]
seed_offset.offset = 0  # as for a test marked recorded
assert draws(5) == expected
print("done")
"""


@pytest.mark.full
def test_an_offset_shifts_every_generator_and_those_of_child_processes():
    command = [sys.executable, "-c", CODE]
    hidden = (seed_offset.VARIABLE, "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    folder = Path(seed_offset.__file__).parent
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr
