"""sglang-kernel's own extensions on a real GPU, beside what was predicted from its wheel; docs/gpu-kernels-h200.md.

`python -m tests.gpu_kernels.prepare` here, `python -m tests.gpu_kernels` there.
"""
