"""The architecture: public names, imports that only point up the layout, no assert."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ahop_layers as ah

PACKAGE = Path(ah.__file__).parent

# Data flows down this list; a module imports only from those above it.
LAYOUT = """
    version errors
    ops.networks ops.reference ops.chunked ops.cpu ops.ptx ops.ptx_kernels ops.triton_kernels
    ops.gpu ops.backend ops
    similarity table separation association
    variants modulation energy presets fitting memory
    core bags own hopfield layers
    attention foreign converters convert maps plots torchmil
    tabular.network tabular.training tabular.rows tabular.base tabular
""".split()  # noqa: SIM905 - the list reads as the folder does


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = [part for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__"]
        if parts and parts != ["__main__"]:  # a command, and nobody imports it
            found[".".join(parts)] = path
    return found


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ahop_layers"):
            module = node.module.removeprefix("ahop_layers").removeprefix(".")
            candidates = [f"{module}.{alias.name}".strip(".") for alias in node.names]
            names |= {name if name in LAYOUT else module for name in candidates}
        elif isinstance(node, ast.Import):
            names |= {alias.name.removeprefix("ahop_layers.") for alias in node.names if "ahop_layers" in alias.name}
    return names


def test_the_layout_lists_every_module():
    assert set(modules()) == set(LAYOUT)


def test_imports_only_point_up():
    for name, path in modules().items():
        below = [other for other in imports(path) if LAYOUT.index(other) >= LAYOUT.index(name)]
        assert not below, f"{name} imports {below} from below itself"


def test_no_assert_in_the_package():
    for path in modules().values():
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(path.read_text()))), path


def test_public_names():
    assert sorted(ah.__all__) == [
        "AHopError",
        "AdaptiveAttention",
        "AdaptiveHopfield",
        "AdaptiveHopfieldLayer",
        "AdaptiveHopfieldPooling",
        "AdaptiveSimilarity",
        "AssociativeMemory",
        "adapt_",
        "adaptive_similarity",
        "association_maps",
        "backends",
        "footprint",
        "register_base",
        "register_converter",
        "revert_",
        "similarity_parameters",
        "variants",
    ]
    assert all(getattr(ah, name).__doc__ for name in ah.__all__)


def test_parts_that_need_more_are_imported_on_demand():
    code = """
import sys, ahop_layers as ah
assert not {"sklearn", "matplotlib"} & set(sys.modules)
for part in (ah.tabular.AdaptiveMemoryClassifier, ah.plots.association_map, ah.torchmil.AdaptivePool):
    print(part.__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["AdaptiveMemoryClassifier", "association_map", "AdaptivePool"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ah.nothing
