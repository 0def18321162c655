"""Not written yet: says so when asked."""


def unavailable() -> str | None:
    """Why this backend cannot run here, or None if it can."""
    return "not part of this version"


def detail() -> str:
    """One line on how this backend runs here."""
    return ""


def serves(device: str, d: int) -> bool:
    """Whether this backend takes tensors on ``device`` with ``d`` dimensions."""
    return False
