"""What is worth running on GPUs; docs/gpu.md says what it shows. `python -m tests.gpu` runs it."""
