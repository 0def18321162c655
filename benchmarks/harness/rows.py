"""Rows of results: read and written as a whole, each with the machine, versions and commit it was measured with."""

import csv
import os
import subprocess
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

import ahop_layers as ah

RESULTS = Path(__file__).parents[1] / "results"


def describe(device: str) -> str:
    """The device in a few words."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout.splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("Model name")), "CPU")
    return f"{model} x{torch.get_num_threads()}"


def origin(device: str) -> dict[str, str]:
    """Where and with what a row is measured."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False, cwd=RESULTS.parent)
    return {
        "device": describe(device),
        "torch": torch.__version__,
        "ahop_layers": ah.__version__,
        "commit": commit.stdout.strip(),
        "date": date.today().isoformat(),
    }


def read(path: Path) -> list[dict[str, str]]:
    """The rows that are there."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def replaced(
    old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], *names: str
) -> list[Mapping[str, Any]]:
    """Old rows, with the new ones at the place of those that have the same values in the named columns."""

    def key(row: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in names)

    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in new:
        groups.setdefault(key(row), []).append(row)
    known, rows = set(groups), []
    for row in old:
        rows += groups.pop(key(row), []) if key(row) in known else [row]
    return [*rows, *(row for rest in groups.values() for row in rest)]


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace the file as a whole, so that an interruption leaves the old or the new one."""
    if not rows:
        raise ValueError(f"expected rows to write to {path}, got none")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    os.replace(part, path)


class Rows:
    """A file with one row for each figure, to which measurements are added that it does not hold yet."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, read(path)
        self.origin: dict[str, str] = {}

    def about(self, device: str) -> None:
        """Say where the rows to come are measured."""
        self.origin = origin(device)

    def holds(self, key: dict[str, str]) -> bool:
        """Whether this has been measured on this device."""
        wanted = key | {"device": self.origin["device"]}
        return any(all(row[name] == text for name, text in wanted.items()) for row in self.rows)

    def add(self, key: dict[str, str], measured: dict[str, float]) -> None:
        """Keep the figures of one measurement, all of them or none."""
        self.rows += [
            {**key, "measure": name, "value": f"{value:.6g}", **self.origin} for name, value in measured.items()
        ]
        write(self.path, self.rows)
