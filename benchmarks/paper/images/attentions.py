"""The attentions that benchmarks/images.py compares, and the changes that each takes."""

import contextlib
from dataclasses import dataclass
from typing import Any

import ahop_layers as ah
from ahop_layers.similarity import INITS

CHANGES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("adaptive", "eager"), ("lr", "last", "init", "debias", "shared")),
    **dict.fromkeys(("kernel", "sparse"), ("last",)),  # the rest is about a similarity that they do not have
    "dot": (),
}
"""The attentions, and the changes that each takes."""


@dataclass(frozen=True)
class Attention:
    """An attention and its changes, as a row names them: ``adaptive:init=dis,shared``.

    Attributes:
        name: one of :data:`CHANGES`.
        lr: how many times as fast as the rest the similarities learn.
        last: exchange only the attention of the last so many blocks.
        init, debias: of the similarities.
        shared: one set of weights for all heads.
    """

    name: str
    lr: float = 1.0
    last: int | None = None
    init: str = "dot"
    debias: bool = False
    shared: bool = False

    @classmethod
    def read(cls, text: str) -> "Attention":
        """Take a text apart; what the attention does not have raises."""
        name, colon, rest = text.partition(":")
        if name not in CHANGES:
            raise ah.AHopError(f"attention must be one of {', '.join(CHANGES)}, got {text!r}")
        changes: dict[str, Any] = {}
        for part in rest.split(",") if colon else ():
            change, equals, value = part.partition("=")
            if change not in CHANGES[name] or change in changes:
                taken = ", ".join(CHANGES[name]) or "none"
                raise ah.AHopError(f"changes of {name} must be among {taken}, each once, got {text!r}")
            changes[change] = _value(change, value if equals else None, text)
        return cls(name, **changes)


def _value(change: str, value: str | None, text: str) -> Any:
    """What a change is set to; ``value`` is None where the text has no ``=``."""
    if change in ("debias", "shared"):
        expected = "have no value"
        if value is None:
            return True
    elif change == "init":
        expected = f"be one of {', '.join(INITS)}"
        if value in INITS:
            return value
    else:
        kind, expected = (int, "be a whole number above 0") if change == "last" else (float, "be a number above 0")
        with contextlib.suppress(ValueError):
            if (number := kind(value or "")) > 0:
                return number
    raise ah.AHopError(f"{change} must {expected}, got {text!r}")
