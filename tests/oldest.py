"""Print the oldest releases that users of the installed package may have, as requirements for ``make test-oldest``."""

from importlib.metadata import requires

USED = ("examples", "tabular", "vit", "mil")
"""The extras that users install; what only develops the package may be new."""


def oldest(requirements: list[str]) -> list[str]:
    """The lower bounds of what the package and these extras require."""
    parts = (requirement.partition(";") for requirement in requirements)
    wanted = (bound for bound, _, marker in parts if not marker or any(f'"{extra}"' in marker for extra in USED))
    return sorted({bound.strip().replace(">=", "==") for bound in wanted})


if __name__ == "__main__":
    print(*oldest(requires("ahop-layers") or []))
