"""`builder smoke IMAGE --gpus` and its neighbours on a machine with a GPU, in containers of a real engine that is carried there.

Not part of `make test`: docs/gpu.md.
"""

KERNELS = "/opt/kernels/env/lib/python3/site-packages"
"""Where the stand-in image has the wheels' files."""
CUDA_HOME = "/usr/local/cuda"
"""That machine's."""
