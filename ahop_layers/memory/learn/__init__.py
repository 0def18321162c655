"""Learning of similarities: weights are solved for, from damaged queries of stored patterns."""
