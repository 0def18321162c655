"""Checks an adapted model against the plain one: outputs, gradients, copies, checkpoints, compilation and revert."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ahop_layers as ah
from ahop_layers.convert.find import NOT_SEEN

LARGEST_CHANGE = 1e-4
"""Bound of the largest change of an output at initialization, relative to its largest value."""


class Case(NamedTuple):
    """A model to adapt.

    Attributes:
        library: the package that defines it.
        family: name of its architecture.
        make: builds the model and its example, the keywords or positional arguments of a call.
        model: name of the model, if the family has several.
        options: further arguments of ``adapt_``.
    """

    library: str
    family: str
    make: Callable[[], tuple[nn.Module, Any]]
    model: str = ""
    options: Mapping[str, Any] = MappingProxyType({})


class Failed(Exception):
    """A property does not hold."""


def tensors(output: Any) -> Iterator[Tensor]:
    """Yields the floating-point tensors of any output."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for each in output.values():
            yield from tensors(each)
    elif isinstance(output, (list, tuple)):
        for each in output:
            yield from tensors(each)
    elif is_dataclass(output):
        for each in fields(output):
            yield from tensors(getattr(output, each.name))


def call(model: Callable[..., Any], example: Any) -> list[Tensor]:
    """Returns the outputs of a call; random numbers, such as those of a mask, are the same in each call."""
    torch.manual_seed(0)
    output = model(**example) if isinstance(example, Mapping) else model(*example)
    return list(tensors(output))


def change(outputs: list[Tensor], expected: list[Tensor]) -> float:
    """Returns the largest difference of two outputs, relative to the largest value of each tensor."""
    pairs = zip(outputs, expected, strict=True)
    return max(
        (float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs if b.numel()), default=0.0
    )


def randomize(model: nn.Module) -> None:
    """Adds noise to constant parameters: layers that are initialized to zero would hide differences."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel() > 1 and parameter.min() == parameter.max():
                parameter.add_(0.3 * torch.randn_like(parameter))


def calibrate(model: nn.Module, example: Any) -> None:
    """Sets the statistics of batch norms to those of the example: signals of an untrained model would vanish."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    if norms:
        with torch.no_grad():
            call(model, example)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum


def objective(outputs: list[Tensor]) -> Tensor:
    """A linear function of all outputs."""
    parts = (output.float() for output in outputs if output.requires_grad)
    return sum((part * torch.linspace(-1, 1.3, part.numel()).view_as(part)).sum() for part in parts)  # type: ignore[return-value]


def require(condition: bool, message: str) -> None:
    """Raises unless a property holds."""
    if not condition:
        raise Failed(message)


def pickles(model: nn.Module) -> bool:
    """Returns whether a model can be pickled; one with parametrizations cannot."""
    try:
        pickle.dumps(model)
    except Exception:
        return False
    return True


def compiles(model: nn.Module, example: Any) -> list[Tensor] | None:
    """Returns the outputs of the model as one graph, or None if it cannot be compiled into one."""
    torch.compiler.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call(torch.compile(model, fullgraph=True, backend="eager"), example)
    except Exception:
        return None
    finally:
        torch.compiler.reset()


def coverage(result: ah.Report | ah.AHopError) -> dict[str, object]:
    """Returns how many attention modules were adapted, how, and why others were not."""
    if isinstance(result, ah.AHopError):
        reasons = [part.rpartition(" passed over: ")[2] for part in str(result).split("; ")]
        attends = [reason for reason in reasons if not reason.endswith(" with none") and reason != NOT_SEEN]
        empty = {"adapted": 0, "of": "", "how": "", "reasons": "; ".join(attends)}
        return {"coverage": "not" if attends else "none", **empty}
    return {
        "coverage": "partly" if result.passed_over else "fully",
        "adapted": len(result.adapted),
        "of": len(result.adapted) + len(result.passed_over),
        "how": ", ".join(dict.fromkeys(result.how.values())),
        "reasons": "; ".join(dict.fromkeys(result.passed_over.values())),
    }


def check(case: Case, compile: bool = True) -> dict[str, object]:
    """Adapts the model of a case and returns a row of results.

    Raises:
        Failed: a property of adapted models does not hold.
    """
    model, example = case.make()
    model.eval()
    randomize(model)
    calibrate(model, example)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    can_pickle = pickles(model)
    kinds = {name: type(module) for name, module in model.named_modules()}
    with torch.no_grad():
        expected = call(model, example)
        one_graph = compile and compiles(model, example) is not None
        try:
            report = ah.adapt_(model, example=example, by_hand=True, **case.options)
        except ah.AHopError as error:
            return {**coverage(error), "change": "", "one_graph": ""}
        largest = change(call(model, example), expected)
    require(largest <= LARGEST_CHANGE, f"an output changed by {largest:.1e} at initialization")
    parameters = ah.similarity_parameters(model)
    gradients = torch.autograd.grad(objective(call(model, example)), parameters, allow_unused=True)
    missing = [p for p, g in zip(parameters, gradients, strict=True) if g is None or not g.abs().sum() > 0]
    names = [name for name, p in model.named_parameters() if any(p is each for each in missing)]
    require(not names, f"no gradient for {len(names)} of {len(parameters)} parameters: {', '.join(names[:3])}")
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(2.5 * torch.randn_like(parameter))  # attention of untrained models has little effect
        changed = call(model, example)
        moved = change(changed, expected)
        require(moved > 1e-6, f"changed weights change the outputs by {moved:.1e} only")
        if one_graph:
            outputs = compiles(model, example)
            require(outputs is not None, "the adapted model does not compile into one graph, the plain one does")
            difference = change(outputs or [], changed)
            require(difference <= LARGEST_CHANGE, f"the compiled model differs by {difference:.1e}")
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)) if can_pickle else copy.deepcopy(model)):
            require(change(call(twin, example), changed) == 0, "a copy has other outputs")
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        trained = torch.load(buffer, weights_only=True)
        require(set(state) <= set(trained), "a name is missing in the state dict")
        twin.load_state_dict(state)
        require(change(call(twin, example), expected) <= LARGEST_CHANGE, "the original state dict gives other outputs")
        twin.load_state_dict(trained)
        require(change(call(twin, example), changed) == 0, "the loaded state dict gives other outputs")
        for each in (twin, model):
            ah.revert_(each, discard=True)
            require(change(call(each, example), expected) == 0, "revert_ does not restore the outputs")
    require({name: type(module) for name, module in model.named_modules()} == kinds, "revert_ leaves another class")
    require(list(model.state_dict()) == list(state), "revert_ leaves other names in the state dict")
    graph = "yes" if one_graph else "the plain model is not one graph" if compile else ""
    return {**coverage(report), "change": f"{largest:.1e}", "one_graph": graph}
