"""The bag classifier of examples/mil.py and of the bag benchmark: model, poolings, data, batches, pictures."""
