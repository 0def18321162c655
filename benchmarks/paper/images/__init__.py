"""Image classification: accuracy and throughput of vision transformers."""
