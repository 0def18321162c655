"""The docstring of every public name starts with a sentence and has an example, which runs as a doctest."""

import doctest
import inspect
import re
from importlib import import_module

import pytest

import ahop_layers as ah

pytestmark = pytest.mark.slow


INTERFACE = {"forward", "extra_repr", "reset_parameters", "get_extra_state", "set_extra_state"}  # of nn.Module


def public() -> dict[str, object]:
    """Returns the public classes and functions of the package and its modules, and the methods of a memory."""
    found: dict[str, object] = {name: getattr(ah, name) for name in ah.__all__ if name != "variants"}
    for name in ("memory.variants", "plots", "neighbors", "torchmil", "separation"):
        module = import_module(f"ahop_layers.{name}")
        here = [each for each, it in vars(module).items() if getattr(it, "__module__", None) == module.__name__]
        things = {each: getattr(module, each) for each in getattr(module, "__all__", here) if not each.startswith("_")}
        found |= {f"{name}.{each}": it for each, it in things.items() if inspect.isclass(it) or inspect.isfunction(it)}
    methods = {name: it for name, it in vars(ah.AssociativeMemory).items() if inspect.isfunction(it)}
    return found | {name: it for name, it in methods.items() if not name.startswith("_") and name not in INTERFACE}


EXAMPLES = public()


def documented(text: str) -> set[str]:
    """Returns the arguments that the section ``Args`` of a docstring describes; a line may describe several."""
    section = re.search(r"^Args:\n((?: {4,}.*\n|\n)*)", f"{text}\n", flags=re.MULTILINE)
    names = re.findall(r"^ {4}([\w, *]+):", section[1], flags=re.MULTILINE) if section else []
    return {name.strip(" *") for line in names for name in line.split(",")}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_docstring_has_a_sentence_an_example_and_the_arguments_if_there_are_several(name):
    text = inspect.getdoc(EXAMPLES[name]) or ""
    first = text.split("\n\n")[0]
    assert first.endswith((".", ":")), f"the docstring of {name} starts with {first!r}"
    assert doctest.DocTestParser().get_examples(text), f"{name} has no example"
    if inspect.isroutine(EXAMPLES[name]):
        arguments = {each for each in inspect.signature(EXAMPLES[name]).parameters if each not in ("self", "cls")}
        assert len(arguments) < 3 or arguments <= documented(text), name
