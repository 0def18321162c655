"""Stored results: CSV files whose rows record the device, versions, commit and date of each measurement."""

import csv
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path

import torch

import ahop_layers as ah

Row = dict[str, str]

RESULTS = Path(__file__).parents[1] / "results"
"""The results of the documentation."""

ORIGIN = ("device", "torch", "ahop_layers", "commit", "date")
"""The columns that describe where and with what a row is measured."""


def device_name(device: str) -> str:
    """Returns the name of the GPU, or the model of the CPU and the number of threads."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout.splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("Model name")), "CPU")
    return f"{model} x{torch.get_num_threads()}"


def origin(device: str) -> Row:
    """Returns the columns of :data:`ORIGIN`."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False, cwd=RESULTS.parent)
    found = (device_name(device), torch.__version__, ah.__version__, commit.stdout.strip(), date.today().isoformat())
    return dict(zip(ORIGIN, found, strict=True))


def read(path: Path) -> list[Row]:
    """Reads the rows of a CSV file; a file that does not exist has none."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Sequence[Row]) -> None:
    """Replaces a CSV file atomically: an interruption leaves the old or the new file."""
    if not rows:
        raise ValueError(f"expected rows to write to {path}, got none")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    os.replace(part, path)


def rows_with(keys: Iterable[Mapping[str, object]], rows: Sequence[Row]) -> list[Row]:
    """Returns the rows with the values of ``keys``, which all have the same columns, in their order."""
    wanted = [_as_text(key) for key in keys]
    stored = {tuple(row[name] for name in wanted[0]): row for row in rows} if wanted else {}
    return [stored[key] for key in (tuple(each.values()) for each in wanted) if key in stored]


class ResultTable:
    """The rows of a CSV file. Every change is written to the file immediately.

    Args:
        path: the file, which need not exist.
        device: device of the measurements to come; their rows get its :func:`origin`. None to only read.

    Attributes:
        rows: all rows, of this and of other devices.
        origin: the columns that every new row gets.
    """

    def __init__(self, path: Path, device: str | None = None) -> None:
        self.path, self.rows = path, read(path)
        self.origin = {} if device is None else origin(device)

    @property
    def own_rows(self) -> list[Row]:
        """The rows of this device."""
        return [row for row in self.rows if row["device"] == self.origin["device"]]

    def has(self, key: Mapping[str, object]) -> bool:
        """Returns whether a row of this device has the values of ``key``."""
        wanted = _as_text({**key, "device": self.origin["device"]}).items()
        return any(wanted <= row.items() for row in self.rows)

    def add(self, *rows: Mapping[str, object]) -> None:
        """Appends rows."""
        self.rows += self._complete(rows)
        write(self.path, self.rows)

    def add_figures(self, key: Mapping[str, object], figures: Mapping[str, float]) -> None:
        """Appends one row for each figure of a measurement, in the columns ``measure`` and ``value``."""
        self.add(*({**key, "measure": name, "value": f"{value:.6g}"} for name, value in figures.items()))

    def replace(self, rows: Iterable[Mapping[str, object]], *columns: str) -> None:
        """Replaces the rows of this device that have the same values in ``columns``, in place, and appends the rest."""

        def key(row: Row) -> tuple[str, ...]:
            return tuple(row[name] for name in ("device", *columns))

        groups: dict[tuple[str, ...], list[Row]] = {}
        for row in self._complete(rows):
            groups.setdefault(key(row), []).append(row)
        known, kept = set(groups), []
        for row in self.rows:
            kept += groups.pop(key(row), []) if key(row) in known else [row]
        self.rows = [*kept, *(row for rest in groups.values() for row in rest)]
        write(self.path, self.rows)

    def _complete(self, rows: Iterable[Mapping[str, object]]) -> list[Row]:
        return [_as_text({**row, **self.origin}) for row in rows]


def _as_text(row: Mapping[str, object]) -> Row:
    return {name: str(value) for name, value in row.items()}
