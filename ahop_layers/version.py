"""The version, in one place: read by the package and by its build."""

__version__ = "0.1.0"
