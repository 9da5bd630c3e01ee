"""`pull`, `load` and `hosts` on a command line: what is wrong with it is told before any host is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder import settings
from builder.cli import main
from builder.hosts.delivery import Once


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("BUILDER_REGISTRY", "BUILDER_PUB", "BUILDER_HOSTS"):
        monkeypatch.delenv(name, raising=False)
    settings.load.cache_clear()


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(list(words))
    return code, capsys.readouterr().err


def test_there_is_no_default_registry(capsys: pytest.CaptureFixture[str]) -> None:
    code, words = told(capsys, "pull", "cu128")
    assert code == 2
    assert words == (
        "error: no registry is named\n  because: there is no default one\n"
        '  hint: `--from REGISTRY/NAME`, or `registry = "REGISTRY/NAME"` in config.toml\n'
    )


def test_gpus_without_the_smoke_test(capsys: pytest.CaptureFixture[str]) -> None:
    code, words = told(capsys, "pull", "cu128", "--from", "r.example/x", "--no-smoke", "--gpus", "all")
    assert (code, words.splitlines()[0]) == (2, "error: `--no-smoke` and `--gpus` together")


@pytest.mark.parametrize("jobs", ["0", "-1", "x", "65", "1.5"])
def test_a_number_of_hosts_at_a_time(capsys: pytest.CaptureFixture[str], jobs: str) -> None:
    with pytest.raises(SystemExit):
        main(["pull", "cu128", "--jobs", jobs])
    assert f"`{jobs}` is not a number from 1 to 64" in capsys.readouterr().err


def test_nothing_is_pulled_without_a_key_to_verify_with(capsys: pytest.CaptureFixture[str]) -> None:
    code, words = told(capsys, "pull", "cu128", "--from", "127.0.0.1:1/x")
    assert code == 2 and "key" in words.splitlines()[0]


def test_a_bundle_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _ = told(capsys, "load", str(tmp_path / "none"), "--host", "local")
    assert code == 2


# --- once -------------------------------------------------------------------------------------------------------------


def test_a_value_is_made_once() -> None:
    numbers = iter([7, 8])
    once = Once(lambda: next(numbers))
    before = once.value
    assert (before, once(), once(), once.value) == (None, 7, 7, 7)


def test_what_making_it_raised_is_raised_again() -> None:
    made: list[int] = []

    def fail() -> int:
        made.append(1)
        raise ValueError("no")

    once = Once(fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            once()
    assert made == [1]
