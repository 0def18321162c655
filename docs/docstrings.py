"""Griffe extension that converts docstrings to Markdown: doctests become code blocks, Sphinx roles become links."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", flags=re.MULTILINE)  # up to the next empty line
ROLE = re.compile(r":(?:class|func|meth|mod):`~?([\w.]+)`")
SHARED = re.compile(r"^ +\w+(?:, \w+)+: ", flags=re.MULTILINE)  # one line for several arguments
ARGUMENTS = re.compile(r"^Args:\n((?: {4}.*\n)+)", flags=re.MULTILINE)
ARGUMENT = re.compile(r"^ {4}(\w+(?:, \w+)*):.*\n(?: {5,}.*\n)*", flags=re.MULTILINE)
BORROWED = re.compile(r"arguments (?:but these )?are those of\s+:class:`(\w+)`")


def to_markdown(text: str, path: Callable[[str], str]) -> str:
    """Converts a docstring to Markdown; ``path`` returns the full path of a name in it."""
    text = SHARED.sub(lambda names: names[0].replace(", ", ",\N{FOUR-PER-EM SPACE}"), text)  # griffe splits at spaces
    return EXAMPLE.sub(r"```pycon\n\g<0>\n```", ROLE.sub(lambda role: _link(role[1], path(role[1])), text))


def _link(name: str, path: str) -> str:
    """Links to the last part of a name, if the reference has it."""
    return f'<autoref identifier="{path}" optional><code>{name.split(".")[-1]}</code></autoref>'


def documented(text: str) -> dict[str, str]:
    """The lines of a docstring that describe arguments, by the names at their start."""
    section = ARGUMENTS.search(f"{text}\n")
    return {line[1]: line[0] for line in ARGUMENT.finditer(section[1])} if section else {}


def borrow_arguments(text: str, other: str, names: list[str]) -> str:
    """Adds the descriptions of another docstring for those of the arguments ``names`` that have none."""
    own, others = documented(text), documented(other)
    every = {name: line for found in (others, own) for key, line in found.items() for name in key.split(", ")}
    lines = "".join(dict.fromkeys(every[name] for name in names if name in every))
    section = f"Args:\n{lines}"
    return ARGUMENTS.sub(lambda _: section, text) if own else f"{text}\n\n{section}"


class Docstrings(griffe.Extension):
    """Rewrites the docstrings of a package before they are parsed."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called for the loaded package."""
        self._extend_signatures(pkg["hopfield.adaptive"])
        objects = [*_objects(pkg)]
        for obj in objects:
            if obj.is_class and (borrowed := BORROWED.search(_text(obj))):
                other = obj.module[borrowed[1]]
                obj.docstring.value = borrow_arguments(_text(obj), _text(other), [each.name for each in obj.parameters])
        for obj in objects:
            if obj.docstring:
                obj.docstring.value = to_markdown(_text(obj), partial(path_of, obj=obj))

    @staticmethod
    def _extend_signatures(adaptive: griffe.Module) -> None:
        """Shows the signature of ``_constructor(plain)``, the constructor of an adaptive Hopfield layer."""
        added = [each for each in adaptive["AdaptiveLayer.__init__"].parameters if each.kind.name == "keyword_only"]
        for layer in adaptive.classes.values():
            constructor = layer.members.get("__init__")
            name = re.fullmatch(r"_constructor\((\w+)\)", str(getattr(constructor, "value", "")))
            if name:
                plain = adaptive[name[1]].members["__init__"].parameters
                parameters = griffe.Parameters(*plain, *added)
                layer.set_member("__init__", griffe.Function("__init__", parameters=parameters))


def _objects(parent: griffe.Object) -> Iterator[griffe.Object]:
    """The parent and all objects that are defined in it."""
    yield parent
    for member in parent.members.values():
        if not member.is_alias:
            yield from _objects(member)


def _text(obj: griffe.Object) -> str:
    return obj.docstring.value if obj.docstring else ""


def path_of(name: str, obj: griffe.Object) -> str:
    """The full path of a name in the docstring of an object: a member of its class, else a name of its module."""
    if name.startswith("ahop_layers"):
        return name
    scope = obj if obj.is_class else obj.parent
    if scope and scope.is_class and name in scope.all_members:
        return scope.all_members[name].canonical_path
    try:
        return obj.resolve(name)
    except griffe.NameResolutionError:
        return f"ahop_layers.{name}"
