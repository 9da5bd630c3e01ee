"""What the sites of `builder/patches/capture.py` have to be, said apart from it. Standard library only."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

POSTCONDITIONS: Mapping[str, Callable[[ast.Module], None]] = {}
