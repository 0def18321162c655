"""Tabular classification: memories compared with tree ensembles."""
