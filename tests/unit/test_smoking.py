"""`builder smoke IMAGE`: which images it takes, and what it makes of a container's output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from builder import smoking
from builder.engine import Image
from builder.errors import BuildError, UsageError

REPORT = {"ok": False, "matrix": "tiny", "checks": [{"name": "needed", "ok": False}, {"name": "installed", "ok": True}]}


class FakeEngine:
    """One image, and what its container says."""

    host = "unix:///made"

    def __init__(self, output: list[str | int], labels: dict[str, str] | None = None) -> None:
        self.output = output
        self.labels = {"sglang-stack": "image"} if labels is None else labels
        self.asked: dict[str, Any] = {}

    def find(self, reference: str) -> Image | None:
        return Image("sha256:abcdef0123456789", (), self.labels, 1, ()) if reference == "tiny" else None

    def run(self, image: str, command: list[str], **options: Any) -> Iterator[str | int]:
        self.asked = {"image": image, "program": command[0], **options}
        yield from self.output


def smoked(monkeypatch: pytest.MonkeyPatch, output: list[str | int], **options: Any) -> dict[str, Any]:
    fake = FakeEngine(output)
    monkeypatch.setattr(smoking, "connect", lambda: fake)
    data = smoking.smoke("tiny", user=options.get("user"))
    assert fake.asked["user"] == options.get("user")
    return data


def lines(report: object = REPORT) -> list[str | int]:
    return ["  ok  installed", smoking.MARK, *json.dumps(report, indent=1).split("\n")]


def test_a_report_and_what_was_said_while_it_ran(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = smoked(monkeypatch, [*lines(), 3], user="12345:0")
    assert data == {**REPORT, "image": "sha256:abcdef0123456789"}
    assert capsys.readouterr() == ("", "  ok  installed\n")
    assert smoking.as_text(data) == "tiny: FAILED: needed (image sha256:abcdef012345, no GPU was used)"


def test_a_report_without_failures() -> None:
    data = {"ok": True, "matrix": "tiny", "image": "sha256:abcdef0123456789", "checks": [{"name": "x", "ok": True}]}
    assert smoking.as_text(data) == "tiny: ok, 1 checks (image sha256:abcdef012345, no GPU was used)"


@pytest.mark.parametrize("output", [["Traceback", 1], [1], [*lines(), 137]])
def test_a_container_that_did_not_get_so_far(monkeypatch: pytest.MonkeyPatch, output: list[str | int]) -> None:
    with pytest.raises(BuildError) as caught:
        smoked(monkeypatch, output)
    assert str(caught.value) == (
        f"error: the smoke test could not run in the image\n  because: its container ended with {output[-1]}"
    )


def test_a_damaged_report(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError) as caught:
        smoked(monkeypatch, [smoking.MARK, "{", 0])
    assert str(caught.value).startswith("error: the smoke test's report is damaged\n  because: ")


def test_no_such_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoking, "connect", lambda: FakeEngine([]))
    with pytest.raises(UsageError) as caught:
        smoking.smoke("other", user=None)
    assert str(caught.value) == ("error: there is no image `other`\n  at: unix:///made\n  hint: see `builder list`")


def test_an_image_of_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoking, "connect", lambda: FakeEngine([], {}))
    with pytest.raises(UsageError) as caught:
        smoking.smoke("tiny", user=None)
    assert str(caught.value) == (
        "error: `tiny` is not an image of this builder\n"
        "  because: it has no label `sglang-stack=image`\n"
        "  hint: the test needs the lock that the image was built from"
    )
