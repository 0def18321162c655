"""The architecture: public names, imports that only point up the layout, no assert statements."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import ahop_layers as ah

pytestmark = pytest.mark.slow

PACKAGE = Path(ah.__file__).parent

# A module or folder imports only from entries above it in this list. Imports inside a folder must not be cyclic.
LAYOUT = """
    errors files ops separation similarity packed association training hopfield hflayers attention convert memory
    neighbors torchmil plots
""".split()  # noqa: SIM905 - the list reads as the folder does


@cache
def parsed() -> dict[str, ast.Module]:
    """Maps dotted names inside the package to parsed files; an ``__init__`` has the name of its folder."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = [part for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__"]
        if parts and parts != ["__main__"]:  # a command that no module imports
            found[".".join(parts)] = ast.parse(path.read_text())
    return found


@cache
def imports(name: str) -> set[str]:
    """Returns the modules of the package that a module imports at any level."""
    known, names = parsed(), set()
    for node in ast.walk(known[name]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ahop_layers":
            module = node.module.removeprefix("ahop_layers").removeprefix(".")
            candidates = [f"{module}.{alias.name}".strip(".") for alias in node.names]
            names |= {name if name in known else module for name in candidates}
        elif isinstance(node, ast.Import):
            dotted = (alias.name for alias in node.names if alias.name.split(".")[0] == "ahop_layers")
            names |= {name.removeprefix("ahop_layers").removeprefix(".") for name in dotted}
    return names


def entry(module: str) -> str:
    """Returns the entry of the layout that contains a module."""
    return module.split(".")[0]


def test_imports_only_point_up_and_have_no_cycles():
    for name in parsed():
        others = {entry(other) for other in imports(name)} - {entry(name)}
        below = [other for other in others if LAYOUT.index(other) >= LAYOUT.index(entry(name))]
        assert not below, f"{name} imports {below} from below itself"
    # An ``__init__`` imports the public names of its folder, so the files of that folder cannot import from it.
    graph = {name: {other for other in imports(name) if entry(other) == entry(name)} for name in parsed()}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_no_assert_in_the_package():
    for name, tree in parsed().items():
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(tree)), name


def test_public_names():
    names = """
        AHopError Adaptive AdaptiveAttention AdaptiveHopfield AdaptiveHopfieldLayer AdaptiveHopfieldPooling
        AdaptiveSimilarity AssociativeMemory Blocks ImageSimilarity Repair Report Separation adapt_
        adaptive_similarity association_maps backends extended_optimizer_state footprint hflayers_state_dict
        install_as_hflayers load_similarities parameter_groups patches register_base register_converter revert_
        save_similarities similarity_parameters variants
    """
    assert sorted(ah.__all__) == names.split()
    assert all(getattr(ah, name).__doc__ for name in ah.__all__)
    modules = {"neighbors", "plots", "torchmil"}
    assert {*ah.__all__, "plots", "torchmil", "__version__"} <= set(dir(ah)) <= {*ah.__all__, *modules, "__version__"}
    assert all(hasattr(ah, name) for name in dir(ah))


def test_help_needs_the_core_alone_and_other_modules_are_imported_on_demand():
    code = """import pydoc, sys
import ahop_layers, ahop_layers.plots
assert not {"sklearn", "matplotlib"} & set(sys.modules)
sys.modules |= dict.fromkeys(("sklearn", "matplotlib"))  # cannot be imported
assert "AssociativeMemory" in pydoc.render_doc(ahop_layers)
assert "neighbors" not in dir(ahop_layers) and "plots" in dir(ahop_layers)"""
    subprocess.run([sys.executable, "-c", code], check=True)
    for thing in (ah.neighbors.AdaptiveNeighborsClassifier, ah.plots.association_map, ah.torchmil.AdaptivePool):
        assert thing.__module__.startswith("ahop_layers")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ah.nothing
