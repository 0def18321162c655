"""How the reference reads docstrings beyond Google's style: examples are code, roles of Sphinx are links."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", flags=re.MULTILINE)  # up to the next empty line
ROLE = re.compile(r":(?:class|func|meth|mod):`~?([\w.]+)`")
SHARED = re.compile(r"^ +\w+(?:, \w+)+: ", flags=re.MULTILINE)  # several arguments explained together


def to_markdown(text: str) -> str:
    """A docstring as Markdown."""
    text = SHARED.sub(lambda names: names[0].replace(", ", ",\N{NO-BREAK SPACE}"), text)  # a name ends at a space
    return EXAMPLE.sub(r"```pycon\n\g<0>\n```", ROLE.sub(_link, text))


def _link(role: re.Match[str]) -> str:
    """The last part of a name, as a link if the reference has it; a docstring may leave the package's name out."""
    name = role[1] if role[1].startswith("ahop_layers") else f"ahop_layers.{role[1]}"
    return f'<autoref identifier="{name}" optional><code>{role[1].split(".")[-1]}</code></autoref>'


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object that has been loaded."""
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
