"""Values in YAML that is written as text, so that it can carry comments."""

from __future__ import annotations

import json


def quoted(value: str) -> str:
    """A string as YAML takes it whatever it holds: JSON's strings are YAML's."""
    return json.dumps(value, ensure_ascii=False)
