"""Command ``python -m benchmarks.paper.images``."""

from benchmarks.paper.images.measure import main

if __name__ == "__main__":
    main()
