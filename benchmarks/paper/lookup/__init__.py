"""A robust lookup as the first layer of a network: faces and bags of digits."""
