"""The vision transformer of examples/vit.py and of the image benchmark: model, data, batches, pictures."""
