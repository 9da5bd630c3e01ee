"""The labels by which our images are found again. No import: what has to answer at once reads them too."""

LABEL = "sglang-stack"
"""Prefix of every label of ours, and the label that says `image` or `base`."""

INPUTS_LABEL = f"{LABEL}.inputs"
"""The sha256 of everything that went into an image: equal means that there is nothing to do."""

STAND_IN_LABEL = f"{LABEL}.stand-in"
"""The packages of an image that are not what they are called: it is for tests, and nothing may push it."""
