"""`builder list`: the state of each matrix, its lock and its image."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder import engine, inventory
from builder.engine import Image
from builder.errors import BuildError
from builder.lock import lock_path, write_lock
from tests.made import TINY, artefact, lock_of, tiny


class FakeEngine:
    """The images of an engine."""

    def __init__(self, *images: tuple[str, str]) -> None:
        self.images = images
        self.asked: list[str] = []

    def ours(self, label: str) -> list[Image]:
        self.asked.append(label)
        return [
            Image(f"sha256:{n}", (), {"sglang-stack.matrix": name, "sglang-stack.lock": digest}, 1, ())
            for n, (name, digest) in enumerate(self.images)
        ]


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "engine_host", lambda: None)


def with_engine(monkeypatch: pytest.MonkeyPatch, *images: tuple[str, str]) -> FakeEngine:
    fake = FakeEngine(*images)
    monkeypatch.setattr(inventory, "engine_host", lambda: "unix:///made")
    monkeypatch.setattr(engine, "connect", lambda: fake)
    return fake


def matrix(folder: Path, name: str, text: str = TINY, *, lock: bool = True) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    made = lock_of(tiny(name=name).matrix, artefact("idna", "3.7"))
    if lock:
        write_lock(made, lock_path(path))
    return made.digest


def row(folder: Path) -> dict[str, object]:
    (only,) = inventory.inventory(folder)
    return only


@pytest.mark.usefixtures("no_engine")
def test_a_locked_matrix_of_which_no_engine_tells(tmp_path: Path) -> None:
    matrix(tmp_path, "one")
    assert row(tmp_path) == {
        "name": "one",
        "summary": "A tiny stack",
        "stack": {},
        "cuda": "13.0.2",
        "lock": "locked",
        "image": "unknown",
    }


@pytest.mark.usefixtures("no_engine")
def test_a_valid_matrix_without_a_lock_also_where_its_stack_is_empty(tmp_path: Path) -> None:
    matrix(tmp_path, "one", lock=False)
    found = row(tmp_path)
    assert (found["lock"], found["problem"]) == ("none", "the matrix has no lock")


@pytest.mark.usefixtures("no_engine")
def test_a_matrix_that_was_changed(tmp_path: Path) -> None:
    matrix(tmp_path, "one", f"{TINY}extras: [idna==3.7]\n")
    assert row(tmp_path)["lock"] == "out of date"


@pytest.mark.usefixtures("no_engine")
def test_an_invalid_matrix(tmp_path: Path) -> None:
    matrix(tmp_path, "one", "summary: x\n")
    found = row(tmp_path)
    assert (found["lock"], found["summary"], found["stack"]) == ("invalid", "", {})
    assert found["problem"]


@pytest.mark.usefixtures("no_engine")
def test_a_damaged_lock(tmp_path: Path) -> None:
    matrix(tmp_path, "one")
    (tmp_path / "one.lock.json").write_text("{")
    found = row(tmp_path)
    assert (found["lock"], found["problem"]) == ("invalid", "the lock is not JSON")


@pytest.mark.parametrize(
    ("image", "state"), [("this", "built"), ("another", "older"), ("of another matrix", "not built")]
)
def test_the_state_of_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: str, state: str) -> None:
    digest = matrix(tmp_path, "one")
    images = {"this": ("one", digest), "another": ("one", "f" * 64), "of another matrix": ("two", digest)}
    fake = with_engine(monkeypatch, images[image])
    assert row(tmp_path)["image"] == state
    assert fake.asked == ["sglang-stack=image"]


def test_an_engine_that_fails_is_an_unknown_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix(tmp_path, "one")

    def broken() -> None:
        raise BuildError("the Docker Engine does not answer")

    with_engine(monkeypatch)
    monkeypatch.setattr(engine, "connect", broken)
    assert row(tmp_path)["image"] == "unknown"


def test_no_matrices(tmp_path: Path) -> None:
    assert inventory.as_text(inventory.inventory(tmp_path / "absent")) == "no matrices"


@pytest.mark.usefixtures("no_engine")
def test_the_table(tmp_path: Path) -> None:
    matrix(tmp_path, "one")
    matrix(tmp_path, "bad", "summary: x\n")
    matrix(tmp_path, "unlocked-one", TINY.replace("stack: {}", "stack: {torch: 2.11.0}"), lock=False)
    problem = inventory.inventory(tmp_path)[0]["problem"]
    assert inventory.as_text(inventory.inventory(tmp_path)) == (
        "bad           lock: invalid, image: unknown\n"
        f"              {problem}\n"
        "one           lock: locked, image: unknown\n"
        "              A tiny stack\n"
        "unlocked-one  lock: none, image: unknown\n"
        "              A tiny stack\n"
        "              the matrix has no lock\n"
        "              CUDA 13.0.2: torch 2.11.0"
    )
