"""`python -m builder.patches WHEEL…` prints what facts/patched.yaml has to say of these wheels: the measurement's command.

With `--states` in front it prints the state of every site instead, one a line; with `--table` the tables of docs/patches.md.
`--table` takes releases as well, as `sglang==0.5.9`, and reads of their wheels on the index what it needs.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from builder.errors import BuilderError
from builder.patches.apply import measured, states
from builder.wheel import read_wheel


def _yaml(value: object) -> str:
    """Lists in flow style; a hash may read as a number, and the source has a colon."""
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    text = str(value)
    return json.dumps(text) if len(text) == 64 or ": " in text else text


def _table(words: list[str]) -> str:
    """The tables of these wheels and releases."""
    from packaging.utils import canonicalize_name

    from builder import settings
    from builder.patches.listing import as_table, package_of
    from builder.patches.releases import Releases
    from builder.remote import open_local

    releases = Releases(settings.load())
    found = []
    for word in words:
        name, release, version = word.partition("==")
        found.append(
            package_of(releases.release(canonicalize_name(name), version) if release else open_local(Path(word)))
        )
    return as_table(found)


def main(arguments: list[str]) -> int:
    """Print one fact a file, one state a line, or tables; the wheels are named by their paths."""
    source = f"measured on the wheel, {datetime.now(UTC).date()}: `python -m builder.patches WHEEL`"
    try:
        if arguments[:1] == ["--table"]:
            print(_table(arguments[1:]))
            return 0
        if arguments[:1] == ["--states"]:
            for row in states(Path(path) for path in arguments[1:]):
                print(
                    " ".join(row[key] for key in ("package", "version", "id", "state", "file", "looked_for")).rstrip()
                )
            return 0
        for path in arguments:
            for row in measured(read_wheel(Path(path))):
                lines = [f"{key}: {_yaml(value)}" for key, value in {**row, "source": source}.items()]
                print("  - " + "\n    ".join(lines))
    except BuilderError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
