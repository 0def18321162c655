"""The library of the native CPU kernel: how it is built and when it is loaded."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ahop_layers as ah
from ahop_layers.ops import cpu

LIBRARY = Path(cpu.__file__).with_name("_footprint.so")
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
built = pytest.mark.skipif(not LIBRARY.is_file(), reason="the library is not built")
compiles = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


ONES = torch.ones(2, 3), torch.ones(4, 3), torch.ones(2, 3)


@pytest.fixture
def reload(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Loads the library that a value of AHOP_CPU_LIBRARY names, as a new process would."""

    def clear() -> None:
        cpu._library.cache_clear()
        cpu.instruction_sets.cache_clear()

    def reload(path: str) -> None:
        monkeypatch.setenv("AHOP_CPU_LIBRARY", path)
        clear()

    yield reload
    clear()


@pytest.fixture
def reason(reload: Callable[[str], None]) -> Callable[[Path], str]:
    """Why a library is not used, while another backend computes the scores."""

    def reason(path: Path) -> str:
        reload(str(path))
        available, detail = ah.backends()["cpu"]
        assert not available
        assert ah.adaptive_similarity(*ONES).shape == (2, 4)
        with pytest.raises(ah.AHopError, match="backend='cpu' is not available here: "):
            ah.adaptive_similarity(*ONES, backend="cpu")
        return detail

    return reason


@built
def test_a_copy_of_the_library_is_loaded(tmp_path, reload, monkeypatch):
    shutil.copy(LIBRARY, tmp_path)
    monkeypatch.chdir(tmp_path)
    for path in (str(tmp_path / LIBRARY.name), f"./{LIBRARY.name}"):
        reload(path)
        assert ah.backends()["cpu"].available
        assert ah.adaptive_similarity(*ONES).shape == (2, 4)


def test_a_file_that_is_no_library_is_not_loaded(tmp_path, reason):
    library = tmp_path / "library.so"
    library.write_bytes(b"not a library")
    assert "library.so cannot be loaded: " in reason(library)
    assert "missing.so does not exist: " in reason(tmp_path / "missing.so")


@compiles
@pytest.mark.parametrize("version", [cpu.ABI_VERSION + 1, None])
def test_a_stale_library_is_not_used(tmp_path, reason, version):
    functions = ["ahop_isa", "ahop_forward", "ahop_backward"]
    source = "".join(f"void *{name}(void) {{ return 0; }}\n" for name in functions)
    expected = "cannot be loaded: "  # from before there was an ABI version
    if version is not None:
        source += f"long ahop_abi_version(void) {{ return {version}; }}"
        expected = f"has ABI version {version}, expected {cpu.ABI_VERSION}; reinstall the package"
    library = tmp_path / "stale.so"
    library.with_suffix(".c").write_text(source)
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", str(library), str(library.with_suffix(".c"))], check=True)
    assert f"stale.so {expected}" in reason(library)
