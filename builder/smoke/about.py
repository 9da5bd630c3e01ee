"""What this image is and what was verified of it: `docker run IMAGE` prints this.

Standard library only. Reads the lock and the proof beside it and says no more than they do.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def load(folder: str, name: str) -> Any:
    """A JSON file of the image's proof."""
    with open(os.path.join(folder, name), encoding="utf-8") as file:
        return json.load(file)


def text(folder: str) -> list[str]:
    """The description, as lines."""
    about, proof = load(folder, "about.json"), load(folder, "smoke.json")
    lines = [f"{about['matrix']}: {about['summary']}", *([about["stand_in"]] if about.get("stand_in") else []), ""]
    rows = [
        ("lock", about["lock"]),
        ("as of", about["as_of"]),
        ("system", about["system"]),
        ("python", about["python"]),
    ]
    rows += [("CUDA", about["cuda"])] if about["cuda"] else []
    rows += [(name, version) for name, version in about["stack"]]
    rows += [
        ("GPU targets", ", ".join(about["gpus"])),
        *((("patches" if i == 0 else ""), line) for i, line in enumerate(about["patches"] or ["none"])),
    ]
    rows += [("user", f"uid {os.getuid()}, gid {os.getgid()}")]
    width = max(len(name) for name, _ in rows)
    lines += [f"  {name:<{width}}  {value}" for name, value in rows]
    checks = proof["checks"]
    verdict = "passed in the build" if proof["ok"] else "FAILED"
    applied = [check for check in checks if not check["detail"].startswith("not applicable")]
    lines += ["", f"ABI smoke test: {verdict}, {len(applied)} checks, no GPU was used"]
    wide = max((len(check["name"]) for check in applied), default=0)
    for check in applied:
        state = "ok" if check["ok"] else "FAILED"
        lines.append(f"  {state:<6}  {check['name']:<{wide}}  {check['looked_at']:>9,} {check['unit']}")
    lines += ["", "start a server: python3 -m sglang.launch_server --help"] if about["sglang"] else []
    return lines


if __name__ == "__main__":
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    print("\n".join(text(sys.argv[1] if len(sys.argv) > 1 else here)))
