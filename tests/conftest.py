"""Options and fixtures shared by the tests."""

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import seed_offset
import torch

CUDA = torch.cuda.is_available()
collect_ignore = ["seeds"]  # its sitecustomize.py is not the one that Debian's Python has imported


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed-offset", type=int, default=0, metavar="N", help="add N to every seed of the suite")
    parser.addoption("--full", action="store_true", help="run the tests marked full too, as make test-all does")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all modules are imported: it would visit their objects again and again
    if config.getoption("seed_offset"):
        seed_offset.install(config.getoption("seed_offset"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests marked ``full``, unless they were asked for."""
    if providers := sys.modules.get("hypothesis.internal.conjecture.providers"):
        # It would parse all imported modules for constants, those of models too, which takes 15 s in a fresh checkout.
        providers.is_local_module_file = lambda path: "/ahop_layers/" in path
    if not config.getoption("full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


def pytest_collection_finish() -> None:
    """Leaves the objects of the imported modules, about 700,000, out of every later garbage collection."""
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignores files of slow tests under ``-m "not slow …"`` without importing them: their imports take seconds."""
    if not config.getoption("markexpr").startswith("not slow") or collection_path.suffix != ".py":
        return None
    return "\npytestmark = pytest.mark.slow\n" in collection_path.read_text() or None


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds torch. A test marked ``recorded`` compares with values of one seed, which an offset must not change."""
    if seed_offset.offset and request.node.get_closest_marker("recorded"):
        monkeypatch.setattr(seed_offset, "offset", 0)
        monkeypatch.setenv(seed_offset.VARIABLE, "0")
    if CUDA:
        torch.manual_seed(0)
    else:  # it would keep stack traces of the calls for devices that are not initialized, which takes milliseconds
        torch.default_generator.manual_seed(seed_offset.shifted(0))


@pytest.fixture(autouse=True)
def _numerics() -> Iterator[None]:
    """Restores the global settings that change the last bit of torch's own sums.

    Some tests set the number of threads. torch itself disables oneDNN for the process, with a warning, after the first
    bfloat16 product on a CPU without support for it.
    """
    threads, onednn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    yield
    torch.set_num_threads(threads)
    torch.backends.mkldnn.enabled = onednn


@pytest.fixture
def small_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solves fits of a memory from few queries, candidates and steps."""
    from ahop_layers.memory.learn import candidates, members, questions, regression

    sizes = {
        "QUERIES": 128,
        "MOST_QUERIES": 128,
        "TRIAL_QUERIES": 64,
        "CANDIDATES": 64,
        "STEPS": 30,
    }
    for name, value in sizes.items():
        for module in (candidates, members, questions, regression):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """The default group of torch.distributed, with this process as its only rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("torch.distributed with gloo is not available")
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills uninitialized memory with NaN, so that an element a kernel does not write shows up."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        original = getattr(owner, name)

        def poisoned(*args, original=original, **keywords):
            tensor = original(*args, **keywords)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(owner, name, poisoned)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the ``main`` of an example that must end with usage, one line and exit status 2; returns the line."""

    def run(main: Callable[[list[str]], object], *arguments: object, usage: bool = True) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([str(each) for each in arguments])
        lines = capsys.readouterr().err.splitlines()
        assert stopped.value.code == 2
        assert sum(line.startswith("usage: ") for line in lines) == usage
        assert usage or len(lines) == 1
        return lines[-1]

    return run
