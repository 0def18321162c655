"""What to say where a benchmark's data is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

from ahop_layers import AHopError


@contextmanager
def files_needed() -> Iterator[None]:
    """End the program with what is missing and where it is described, in place of a traceback."""
    try:
        yield
    except (FileNotFoundError, AHopError) as error:
        raise SystemExit(f"{error}\ndocs/data.md says which files are read and where they come from") from None
