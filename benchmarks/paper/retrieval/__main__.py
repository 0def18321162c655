"""Command ``python -m benchmarks.paper.retrieval``."""

from benchmarks.paper.retrieval.measure import main

if __name__ == "__main__":
    main()
