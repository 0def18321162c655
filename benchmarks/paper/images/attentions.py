"""The attentions of the image benchmark and their options."""

import contextlib
from dataclasses import dataclass
from typing import Any

import ahop_layers as ah
from ahop_layers.similarity.adaptive import INITS

OPTIONS: dict[str, tuple[str, ...]] = {
    "adaptive": ("lr", "last", "init", "debias", "shared", "blocks"),
    "eager": ("lr", "last", "init", "debias", "shared"),
    **dict.fromkeys(("kernel", "sparse"), ("last",)),  # the other options are those of adaptive similarities
    "dot": (),
}
"""The attentions, and the options of each."""


@dataclass(frozen=True)
class Attention:
    """An attention and its options, written as ``adaptive:init=dis,shared`` in commands and rows.

    Attributes:
        name: a key of :data:`OPTIONS`.
        lr: learning-rate multiplier of the similarity parameters.
        last: replace the attention of the last ``last`` blocks only; None for all blocks.
        init: initialization of the similarities.
        debias: whether the similarities learn a bias.
        shared: whether all heads share one set of weights.
        blocks: number of blocks that are sorted in each head; None for all dimensions.
    """

    name: str
    lr: float = 1.0
    last: int | None = None
    init: str = "dot"
    debias: bool = False
    shared: bool = False
    blocks: int | None = None

    @classmethod
    def read(cls, text: str) -> "Attention":
        """Parses a text.

        Raises:
            AHopError: an unknown attention, option or value.
        """
        name, colon, rest = text.partition(":")
        if name not in OPTIONS:
            raise ah.AHopError(f"attention must be one of {', '.join(OPTIONS)}, got {text!r}")
        options: dict[str, Any] = {}
        for part in rest.split(",") if colon else ():
            option, equals, value = part.partition("=")
            if option not in OPTIONS[name] or option in options:
                known = ", ".join(OPTIONS[name]) or "none"
                raise ah.AHopError(f"options of {name} must be among {known}, each at most once, got {text!r}")
            options[option] = _value(option, value if equals else None, text)
        return cls(name, **options)


def _value(option: str, value: str | None, text: str) -> Any:
    """Parses the value of an option, None for an option without ``=``."""
    if option in ("debias", "shared"):
        expected = "have no value"
        if value is None:
            return True
    elif option == "init":
        expected = f"be one of {', '.join(INITS)}"
        if value in INITS:
            return value
    else:
        counts = option in ("last", "blocks")
        kind, expected = (int, "be a positive integer") if counts else (float, "be a positive number")
        with contextlib.suppress(ValueError):
            if (number := kind(value or "")) > 0:
                return number
    raise ah.AHopError(f"{option} must {expected}, got {text!r}")
