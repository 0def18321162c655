"""Fixtures shared by the tests."""

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _numerics() -> Iterator[None]:
    """Give back what changes the last bit of torch's own sums.

    Tests take threads. And torch switches oneDNN off for good, with a warning, once it has asked it for a bfloat16
    product on a CPU that has none.
    """
    threads, onednn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    yield
    torch.set_num_threads(threads)
    torch.backends.mkldnn.enabled = onednn


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN, so that an element a kernel forgets to write shows."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        original = getattr(owner, name)

        def poisoned(*args, original=original, **keywords):
            tensor = original(*args, **keywords)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(owner, name, poisoned)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the ``main`` of an example that must end with usage, one line and exit status 2; returns the line."""

    def run(main: Callable[[list[str]], object], *arguments: object) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([str(each) for each in arguments])
        lines = capsys.readouterr().err.splitlines()
        assert stopped.value.code == 2
        assert sum(line.startswith("usage: ") for line in lines) == 1
        return lines[-1]

    return run
