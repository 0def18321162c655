"""Print the lower bounds of the installed package's requirements, pinned, for ``make test-oldest``."""

from importlib.metadata import requires

USED = ("examples", "sklearn", "vit", "mil", "save", "search", "metric")
"""The extras for users. Development tools need not be old."""


def oldest(requirements: list[str]) -> list[str]:
    """Returns the lower bounds of the requirements of the package and of the user extras, as ``name==version``."""
    parts = (requirement.partition(";") for requirement in requirements)
    wanted = (bound for bound, _, marker in parts if not marker or any(f'"{extra}"' in marker for extra in USED))
    return sorted({bound.strip().replace(">=", "==") for bound in wanted})


if __name__ == "__main__":
    print(*oldest(requires("ahop-layers") or []))
