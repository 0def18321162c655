"""What the ViT example and the image benchmark share: model, data, batches, pictures."""
