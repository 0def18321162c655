"""Command ``python -m benchmarks.paper.mil``."""

from benchmarks.paper.mil.measure import main

if __name__ == "__main__":
    main()
