"""The search benchmark: the class of a damaged image, by the package and by its rivals."""
