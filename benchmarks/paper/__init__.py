"""The experiments of the paper, each a package with a command: ``python -m benchmarks.paper.retrieval`` and so on."""
