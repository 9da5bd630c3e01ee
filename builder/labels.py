"""The labels and names by which our images are found again. No import: what has to answer at once reads them too."""

LABEL = "sglang-stack"
"""Prefix of every label of ours, and the label that says `image` or `base`."""

INPUTS_LABEL = f"{LABEL}.inputs"
"""The sha256 of everything that went into an image: equal means that there is nothing to do."""

STAND_IN_LABEL = f"{LABEL}.stand-in"
"""The packages of an image that are not what they are called: it is for tests, and nothing may push it."""

DRIVER_LABEL = f"{LABEL}.driver"
"""The oldest driver that runs the image's wheels: a version or a branch (`580`). A GPU may ask for a newer one."""

REQUIRES_LABEL = f"{LABEL}.requires"
"""What the image asks of NVIDIA's container toolkit, as in its NVIDIA_REQUIRE_CUDA."""

PARTIAL_LABEL = f"{LABEL}.partial"
"""An image that holds the layers of a pull that is not done yet; a pull that ends removes it."""


def content_tag(matrix: str, lock: str) -> str:
    """The tag that an image's content gives it: the matrix, and the first 12 digits of its lock's digest."""
    return f"{matrix}-{lock[:12]}"


def image_names(matrix: str, lock: str) -> tuple[str, str]:
    """The names of an image in an engine: by content, and by matrix. ``lock`` is the digest of its lock."""
    return f"{LABEL}:{content_tag(matrix, lock)}", f"{LABEL}:{matrix}"
