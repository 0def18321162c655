"""Similarities of queries and keys: learned, of images, and as a table; blocks of dimensions and widths of bases."""
