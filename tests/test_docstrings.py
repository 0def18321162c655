"""The docstring of every public name starts with a sentence and has an example that runs as a doctest."""

import doctest
import inspect
from types import ModuleType

import pytest

import ahop_layers as ah
from ahop_layers import plots, separation, tabular, torchmil, variants
from ahop_layers.memory import kernel as modulation
from ahop_layers.memory import table

pytestmark = pytest.mark.slow

# Methods of the interfaces of nn.Module and scikit-learn: the example of the class calls them.
INTERFACE = {"forward", "extra_repr", "reset_parameters", "fit", "predict", "predict_proba", "decision_function"}
INTERFACE |= {"get_extra_state", "set_extra_state"}
# Methods of every variant: the examples of the classes call them.
OF_VARIANTS = {"corrupt", "sample", "shift"}
# Methods of a custom converter: register_converter has the example.
FOR_CONVERTERS = {"head_shape", "make_adaptive", "associate"}
# Modules with the interface of hflayers.
OF_HFLAYERS = {"ahop_layers.hopfield.base", "ahop_layers.hopfield.layers", "ahop_layers.hopfield.core"}


def of_module(module: ModuleType) -> list[object]:
    """Returns the classes and functions in ``__all__`` of a module, or all public ones that it defines."""
    if hasattr(module, "__all__"):
        found = [getattr(module, name) for name in module.__all__]
        return [thing for thing in found if not inspect.ismodule(thing)]
    return [
        thing
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(thing) or inspect.isfunction(thing))
        and thing.__module__ == module.__name__
    ]


def public() -> dict[str, object]:
    """Returns every public class and function, and every public method once: where it is first defined."""
    found: dict[str, object] = {}
    for module in (ah, variants, plots, tabular, torchmil, separation, table, modulation):
        found |= {f"{module.__name__}.{thing.__name__}": thing for thing in of_module(module)}
    methods = {}
    for owner in [thing for thing in found.values() if inspect.isclass(thing)]:
        for name, method in inspect.getmembers(owner, inspect.isroutine):
            module = getattr(method, "__module__", None) or ""
            if module.startswith("ahop_layers") and module not in OF_HFLAYERS and not name.startswith("_"):
                documented = [base for base in owner.__mro__ if base.__module__.startswith("ahop_layers")]
                first = [base for base in documented if name in vars(base) and base.__module__ not in OF_HFLAYERS][-1]
                method = getattr(first, name)
                methods[f"{first.__module__}.{method.__qualname__}"] = method
    chosen = {name: it for name, it in methods.items() if it.__name__ not in INTERFACE | OF_VARIANTS | FOR_CONVERTERS}
    return found | chosen


PUBLIC = public()


def test_every_public_name_is_checked():
    assert {f"ahop_layers.{name}" for name in ah.__all__ if name != "variants"} <= set(PUBLIC)
    expected = {"memory.memory.AssociativeMemory.retrieve", "tabular.memory.AdaptiveMemory.nearest_cases"}
    assert {f"ahop_layers.{name}" for name in expected} <= set(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_sentence_and_an_example(name):
    text = inspect.getdoc(PUBLIC[name]) or ""
    first = text.split("\n\n")[0]
    assert first.endswith((".", ":")), f"the docstring of {name} starts with {first!r}"
    assert doctest.DocTestParser().get_examples(text), f"{name} has no example"


@pytest.mark.parametrize("name", sorted(name for name, thing in PUBLIC.items() if inspect.isroutine(thing)))
def test_three_or_more_arguments_are_documented(name):
    arguments = [each for each in inspect.signature(PUBLIC[name]).parameters if each not in ("self", "cls")]
    text = inspect.getdoc(PUBLIC[name]) or ""
    if len(arguments) >= 3:
        assert "Args:" in text, name
        assert not [each for each in arguments if each not in text], name
