"""Command ``python -m benchmarks.paper.tabular``."""

from benchmarks.paper.tabular.measure import main

if __name__ == "__main__":
    main()
