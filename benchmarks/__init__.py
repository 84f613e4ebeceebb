"""Measurements of tfdist beside its peers; each prints a table and writes JSON to benchmarks/results."""
