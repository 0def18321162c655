"""Code that several examples share: command line, training, checkpoints, output files, similarities."""
