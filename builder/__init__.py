"""Proven container images for SGLang stacks: version matrix, lock, Dockerfile, ABI smoke test."""

__version__ = "0.1.0"
