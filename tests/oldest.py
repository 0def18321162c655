"""Print the oldest releases that pyproject.toml allows, as requirements: what ``make test-oldest`` installs."""

from pathlib import Path

import tomllib

USED = ("examples", "tabular", "vit", "mil")
"""The extras that users install; what only develops the package may be new."""


def oldest(project: dict) -> list[str]:
    """Each requirement of users at its lower bound."""
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(requirement for extra in USED for requirement in extras[extra])]
    return sorted({requirement.replace(">=", "==") for requirement in wanted})


if __name__ == "__main__":
    file = Path(__file__).parents[1] / "pyproject.toml"
    print(*oldest(tomllib.loads(file.read_text())["project"]))
