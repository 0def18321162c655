"""Adds an offset to every seed: ``pytest --seed-offset N`` runs the suite with other random numbers.

Generators of torch, NumPy and the standard library that are created or seeded with an integer take the integer plus the
offset. Child processes take the offset from the environment, through ``sitecustomize.py`` beside this file.
"""

import os
import random
from pathlib import Path

import numpy as np
import torch

VARIABLE = "AHOP_SEED_OFFSET"
offset = 0


def shifted(seed):
    """Returns a valid integer seed plus the offset, and anything else unchanged."""
    valid = isinstance(seed, (int, np.integer)) and not isinstance(seed, bool) and 0 <= seed < 2**31
    return int(seed) + offset if valid and offset else seed


def shift_function(owner, name: str) -> None:
    """Replaces a function whose first argument is a seed."""
    original = getattr(owner, name)

    def function(seed=None, *args, **keywords):
        return original(shifted(seed), *args, **keywords)

    setattr(owner, name, function)


def shift_class(owner, name: str, method: str) -> None:
    """Replaces a class by a subclass one method of which takes a seed. Instances of the class count as its own."""
    original = getattr(owner, name)

    class Meta(type(original)):
        def __instancecheck__(cls, instance):
            return isinstance(instance, original)

    def seeded(self, seed=None):
        return getattr(original, method)(self, shifted(seed))

    setattr(owner, name, Meta(name, (original,), {method: seeded}))


def install(start: int) -> None:
    """Shifts all seeds of this process and of its children from now on."""
    global offset
    if not offset:
        for owner, name in (
            (torch, "manual_seed"),
            (torch.random, "manual_seed"),
            (np.random, "seed"),
            (np.random, "default_rng"),
            (random, "seed"),
        ):
            shift_function(owner, name)
        shift_class(torch, "Generator", "manual_seed")
        shift_class(np.random, "RandomState", "__init__")
        shift_class(random, "Random", "__init__")
    offset = start
    folder = str(Path(__file__).parent)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ[VARIABLE] = str(start)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *(path for path in paths if path not in ("", folder))])
