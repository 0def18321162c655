"""How an adaptive layer gets its similarity: from options, and with a dimension that the first query tells."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter, is_lazy

from ahop_layers.errors import AHopError, check_pair
from ahop_layers.separation import Separation
from ahop_layers.similarity.adaptive import AdaptiveSimilarity, BaseArgument, Init
from ahop_layers.similarity.blocks import BlocksArgument, as_blocks

SimilaritySource = nn.Module | Callable[[int, int | None], nn.Module]
"""A similarity module, or a factory ``f(dim, num_heads)`` that returns one."""


class LazyAdaptiveSimilarity(LazyModuleMixin, AdaptiveSimilarity):
    """An AdaptiveSimilarity that infers ``dim`` from the first query."""

    cls_to_become = AdaptiveSimilarity

    def __init__(
        self, num_heads: int, bases: Sequence[BaseArgument], init: Init, debias: bool, blocks: BlocksArgument = None
    ) -> None:
        given = as_blocks(blocks)
        n = None if given.is_auto else given.assignment
        # Twice the number of blocks stands in for the unknown dimension.
        super().__init__(2 * n if n else 16 if given.is_auto else 1, num_heads, bases, init, debias, given)
        self.blocks, unknown = given, ("w" if n is None else "", "bias" if debias else "")
        for name in filter(None, unknown):
            self.register_parameter(name, UninitializedParameter())  # type: ignore[arg-type]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}_extra_state"] = self.get_extra_state()  # which LazyModuleMixin omits
        self._mark_absent(destination, prefix)

    def reset_parameters(self) -> None:
        """Resets all parameters once their shapes are known."""
        if not self.has_uninitialized_params():
            super().reset_parameters()

    def initialize_parameters(self, query: Tensor, key: Tensor) -> None:
        """Infers ``dim`` from ``query (..., d)`` and initializes the parameters."""
        check_pair(query, key)
        dim, loaded = query.shape[-1], None if is_lazy(self.w) else self.w.shape[-1]
        blocks = self.blocks.chosen(dim, loaded)
        n = blocks.count(dim)  # raises if the blocks do not fit
        self.dim, self.blocks = dim, blocks
        if self.has_uninitialized_params():
            for name, parameter in list(self.named_parameters(recurse=False)):
                if isinstance(parameter, UninitializedParameter):
                    sizes = (self.dim,) if name == "bias" else (len(self.bases), n)
                    parameter.materialize((self.num_heads or 1, *sizes))
            self.reset_parameters()


@dataclass(frozen=True, eq=False)
class SimilarityOptions:
    """From what an adaptive layer makes its similarity and its separation.

    Public functions and classes build it from their keywords; :class:`~ahop_layers.AdaptiveHopfield` explains them.
    None, False or ``"auto"`` means that an option is not given.
    """

    bases: Sequence[BaseArgument] | None = None
    init: Init | None = None
    debias: bool = False
    separation: str | Separation | None = None
    similarity: SimilaritySource | None = None
    blocks: BlocksArgument = "auto"

    def copied(self) -> "SimilarityOptions":
        """Returns the options with copies of their modules, so that no two layers share one."""
        modules = {"separation": self.separation, "similarity": self.similarity}
        copies: Any = {name: deepcopy(each) for name, each in modules.items() if isinstance(each, nn.Module)}
        return replace(self, **copies)

    def make_separation(self, num_heads: int | None) -> Separation:
        """Returns the separation of a layer; ``num_heads`` is for one that learns."""
        if isinstance(self.separation, Separation):
            return self.separation
        return Separation("softmax" if self.separation is None else self.separation, num_heads)

    def make_similarity(self, dim: int | None, num_heads: int | None) -> nn.Module:
        """Returns the similarity of a layer; ``dim`` of a head is None to infer it from the first query."""
        if self.similarity is None:
            bases = ("dis", "dot") if self.bases is None else self.bases
            init = "dot" if self.init is None else self.init
            dim = _known_dim(init, self.blocks) if dim is None else dim
            if dim is None:
                return LazyAdaptiveSimilarity(num_heads or 1, bases, init, self.debias, self.blocks)
            return AdaptiveSimilarity(dim, num_heads, bases, init, self.debias, self.blocks)
        if not isinstance(self.similarity, nn.Module) and not callable(self.similarity):
            raise AHopError(f"similarity must be a module or a factory f(dim, num_heads), got {self.similarity!r}")
        blocks = None if isinstance(self.blocks, str) else self.blocks
        replaced = {"bases": self.bases, "init": self.init, "debias": self.debias or None, "blocks": blocks}
        given = ", ".join(f"{name}={value!r}" for name, value in replaced.items() if value is not None)
        if given:
            raise AHopError(f"similarity replaces bases, init, debias and blocks, got similarity together with {given}")
        if isinstance(self.similarity, nn.Module):
            return self.similarity
        if dim is None:
            raise AHopError("a similarity factory needs the dimension of a head, got a layer that infers it")
        built = self.similarity(dim, num_heads)
        if not isinstance(built, nn.Module):
            raise AHopError(f"the similarity factory must return a module, got {type(built).__name__}")
        return built


def _known_dim(init: Init, blocks: BlocksArgument) -> int | None:
    """Returns the dimension that a tensor of blocks, or a tensor of initial weights for all dimensions, determines."""
    given = as_blocks(blocks)
    if given.named is not None:
        return len(given.named)
    full = given.assignment is None or given.is_auto
    return init.shape[-1] if full and isinstance(init, Tensor) and init.ndim else None
