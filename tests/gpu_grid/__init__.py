"""The rules of builder/arch.py against a GPU: images of every target that nvcc has, loaded by the driver.

`python -m tests.gpu_grid --out FOLDER` needs nvcc, g++ and a GPU, and nothing but Python's standard library; it writes
FOLDER/grid.json. tests/unit/arch_grid.json is that file, and a test holds the rules to it.
"""
