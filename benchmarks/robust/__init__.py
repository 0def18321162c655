"""How robust a learned similarity is to damaged queries: accuracy against one-line baselines."""
