"""Benchmarks: `make bench`. Ratios within one run; no test asserts a time."""
