"""Code that all benchmarks share: stored rows, reports, documentation pages, peak memory, data folders."""
