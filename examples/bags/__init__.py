"""What the bag example and the MIL benchmark share: model, data, batches, pictures, poolings."""
