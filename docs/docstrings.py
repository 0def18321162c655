"""Griffe extension that converts docstrings to Markdown: doctests become code blocks, Sphinx roles become links."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", flags=re.MULTILINE)  # up to the next empty line
ROLE = re.compile(r":(?:class|func|meth|mod):`~?([\w.]+)`")
SHARED = re.compile(r"^ +\w+(?:, \w+)+: ", flags=re.MULTILINE)  # one line for several arguments


def to_markdown(text: str) -> str:
    """Convert a docstring to Markdown."""
    text = SHARED.sub(lambda names: names[0].replace(", ", ",\N{NO-BREAK SPACE}"), text)  # griffe splits at spaces
    return EXAMPLE.sub(r"```pycon\n\g<0>\n```", ROLE.sub(_link, text))


def _link(role: re.Match[str]) -> str:
    """Link to the last part of a name, if the reference has it. The package prefix is optional."""
    name = role[1] if role[1].startswith("ahop_layers") else f"ahop_layers.{role[1]}"
    return f'<autoref identifier="{name}" optional><code>{role[1].split(".")[-1]}</code></autoref>'


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each loaded object."""
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Shows the signature that ``_extends(plain)`` gives to the constructor of an adaptive Hopfield layer."""
        adaptive = pkg["hopfield.adaptive"]
        added = [each for each in adaptive["_AdaptiveFace.__init__"].parameters if each.kind.name == "keyword_only"]
        for layer in adaptive.classes.values():
            constructor = layer.members.get("__init__")
            for decorator in constructor.decorators if constructor else ():
                name = re.fullmatch(r"_extends\((\w+)\)", str(decorator.value))
                if name:
                    plain = adaptive[name[1]].members["__init__"].parameters
                    constructor.parameters = griffe.Parameters(*plain, *added)
