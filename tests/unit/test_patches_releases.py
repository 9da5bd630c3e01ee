"""Releases found on an index on loopback and looked at there, by `builder patches` and by what it is made of."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from urllib3.util import Retry

from builder import cli, settings
from builder.errors import IntegrityError, UnreachableError, UsageError
from builder.patches import apply
from builder.patches.releases import Releases, Traffic
from builder.settings import Settings
from tests import loopback as site_of
from tests import patch_made as made
from tests.loopback import Loopback, loopback
from tests.made import artefact, settings_at

PURE = "py3-none-any"
LINUX = "manylinux_2_34_x86_64"
FILES = {file: text.encode() for file, text in made.FLASHINFER.items()}


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loopback]:
    monkeypatch.setattr(Retry, "get_backoff_time", lambda _: 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with loopback() as server:
        yield server


@pytest.fixture
def mine(site: Loopback, tmp_path: Path) -> Settings:
    return settings_at(tmp_path, index=f"{site.url}/simple")


def add(site: Loopback, name: str, version: str, tag: str = PURE, files: dict[str, bytes] | None = None) -> str:
    return site.add(site_of.wheel(name, version, tag=tag, files=files), beside=False)


# --- which wheel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tags", "best"),
    [
        ([PURE], PURE),
        ([f"cp39-cp39-{LINUX}", f"cp313-cp313-{LINUX}", f"cp310-cp310-{LINUX}"], f"cp313-cp313-{LINUX}"),
        ([f"cp313-cp313-{LINUX}", f"cp314-cp314t-{LINUX}", f"cp314-cp314-{LINUX[:-6]}aarch64"], f"cp313-cp313-{LINUX}"),
        (["cp314-cp314-win_amd64", f"cp311-cp311-{LINUX}", PURE], f"cp311-cp311-{LINUX}"),
        ([f"cp39-abi3-{LINUX}", "pp310-pypy310_pp73-manylinux_2_34_x86_64"], f"cp39-abi3-{LINUX}"),
    ],
)
def test_the_wheel_for_the_newest_cpython_on_linux(site: Loopback, mine: Settings, tags: list[str], best: str) -> None:
    for tag in tags:
        add(site, "sglang", "0.5.9", tag)
    add(site, "sglang", "0.5.10", f"cp315-cp315-{LINUX}")
    assert Releases(mine).release("sglang", "0.5.9").path == Path(f"sglang-0.5.9-{best}.whl")


def refused(mine: Settings, name: str, version: str, kind: type[Exception] = UsageError) -> str:
    with pytest.raises(kind) as caught:
        Releases(mine).release(name, version)
    return str(caught.value).replace((mine.index or "").removeprefix("http://").removesuffix("/simple"), "SITE")


def test_a_release_that_does_not_exist(site: Loopback, mine: Settings) -> None:
    for version in ("0.5.7", "0.5.8", "0.5.9", "0.5.10", "0.5.10.post1", "0.5.11", "0.5.12", "0.5.13"):
        add(site, "sglang", version)
    assert refused(mine, "sglang", "0.5.10.post2") == (
        "error: sglang has no release 0.5.10.post2\n"
        "  because: the index has 8, from 0.5.7 to 0.5.13\n"
        "  hint: near it are `0.5.10`, `0.5.10.post1`, `0.5.11`, `0.5.12`"
    )
    for version, near in (
        ("9", "  hint: near it are `0.5.10.post1`, `0.5.11`, `0.5.12`, `0.5.13`"),
        ("0.1", "  hint: near it are `0.5.7`, `0.5.8`, `0.5.9`, `0.5.10`"),
    ):
        assert refused(mine, "sglang", version).splitlines()[-1] == near
    assert refused(mine, "sglang", "0.5.nine") == (
        "error: `0.5.nine` is not a version\n  hint: as in `0.5.9` or `0.5.10.post1`"
    )
    assert not list((mine.cache / "releases").glob("*"))


def test_a_release_without_a_wheel_for_linux(site: Loopback, mine: Settings) -> None:
    add(site, "sglang", "0.5.9", "cp311-cp311-win_amd64")
    assert refused(mine, "sglang", "0.5.9") == (
        "error: sglang 0.5.9 has no wheel for Linux x86_64\n"
        "  because: the index has sglang-0.5.9-cp311-cp311-win_amd64.whl"
    )


def test_an_index_that_states_no_hashes(site: Loopback, mine: Settings) -> None:
    site.add(site_of.wheel("sglang", "0.5.9"), beside=False, hashes=False)
    assert refused(mine, "sglang", "0.5.9", IntegrityError) == (
        "error: the index states no sha256 of `sglang-0.5.9-py3-none-any.whl`\n"
        "  hint: `--index default=URL` names an index that does"
    )


def test_an_index_that_states_nonsense(site: Loopback, mine: Settings) -> None:
    add(site, "sglang", "0.5.9")
    page = site.files["/simple/sglang/"]
    page.data = re.sub(rb'"sha256": "[0-9a-f]+"', b'"sha256": "../../x"', page.data)
    assert refused(mine, "sglang", "0.5.9", UnreachableError).startswith(
        "error: what the index states of `sglang-0.5.9-py3-none-any.whl` makes no sense\n  because: "
    )


NAMED = "\n  hint: see that the index answers; another is named with `--index default=URL` or `BUILDER_INDEX`"


def test_an_index_that_does_not_answer(site: Loopback, mine: Settings) -> None:
    what = "error: the index does not tell the releases of `sglang`\n  because: "
    assert refused(mine, "sglang", "0.5.9", UnreachableError) == f"{what}it has no page of `sglang`{NAMED}"
    add(site, "sglang", "0.5.9")
    site.files["/simple/sglang/"].status = 403
    assert refused(mine, "sglang", "0.5.9", UnreachableError) == f"{what}SITE answers 403 Forbidden{NAMED}"
    site.files["/simple/sglang/"].status = 200
    site.files["/simple/sglang/"].data = b"<p>Sign in"
    assert refused(mine, "sglang", "0.5.9", UnreachableError) == (
        f"{what}what it answers is no page of `sglang`{NAMED}"
    )
    site.stop()
    assert refused(mine, "sglang", "0.5.9", UnreachableError) == f"{what}SITE refuses the connection{NAMED}"


# --- what is kept, and what is here already ---------------------------------------------------------------------------


def test_a_release_that_is_known_needs_no_index(site: Loopback, mine: Settings) -> None:
    add(site, "flashinfer-python", "0.6.4", files=FILES)
    first = Releases(mine)
    wheel = first.release("flashinfer-python", "0.6.4")
    assert wheel.read(made.COMM) == FILES[made.COMM]
    assert site.paths() == ["/simple/flashinfer-python/", f"/simple/files/{wheel.path}"]
    assert first.traffic == Traffic(wheel_size(site), wheel_size(site), 1)
    site.stop()
    again = Releases(mine)
    assert again.release("flashinfer-python", "0.6.4.0").read(made.COMM) == FILES[made.COMM]
    assert again.traffic == Traffic(0, wheel_size(site), 0)
    # What another index has under this version may be another file.
    assert "refuses the connection" in refused(
        replace(mine, index=f"{site.url}/other"), "flashinfer-python", "0.6.4", UnreachableError
    )


def wheel_size(site: Loopback) -> int:
    (size,) = [len(served.data) for path, served in site.files.items() if path.endswith(".whl")]
    return size


def test_an_answer_that_cannot_be_read_is_asked_for_again(site: Loopback, mine: Settings) -> None:
    add(site, "sglang", "0.5.9")
    Releases(mine).release("sglang", "0.5.9")
    (kept,) = (mine.cache / "releases").iterdir()
    assert json.loads(kept.read_bytes())["file"] == "sglang-0.5.9-py3-none-any.whl"
    for damage in ("", "[]", '{"file": "x"}'):
        kept.write_text(damage)
        assert Releases(mine).release("sglang", "0.5.9").version == "0.5.9"


def test_a_folder_of_wheels_is_looked_into_first(site: Loopback, mine: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    for version in ("0.5.9", "0.5.10"):
        made.make_wheel(folder, "sglang", version, {"sglang/x.py": ""})
    found = Releases(replace(mine, wheels=(folder,))).release("sglang", "0.5.9")
    assert (found.path, site.requests) == (folder / "sglang-0.5.9-py3-none-any.whl", [])


def test_a_server_without_ranges_is_asked_for_the_whole_wheel_and_said_so_once(
    site: Loopback, mine: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sglang", "flashinfer-python"):
        site.files[f"/{add(site, name, '1.0', files=FILES).removeprefix(site.url + '/')}"].ranges = False
    opener = Releases(mine)
    for name in ("sglang", "flashinfer-python"):
        assert opener.release(name, "1.0").read(made.COMM) == FILES[made.COMM]
    said = [line for line in capsys.readouterr().err.splitlines() if "whole" in line]
    assert said == ["sglang-1.0-py3-none-any.whl is fetched whole: its server does not answer byte ranges"]
    total = sum(len(served.data) for path, served in site.files.items() if path.endswith(".whl"))
    assert opener.traffic == Traffic(total, total, 2)
    site.stop()
    assert Releases(mine).release("sglang", "1.0").read(made.COMM) == FILES[made.COMM]


def test_a_locked_wheel_is_the_one_with_its_sha256(site: Loopback, mine: Settings, tmp_path: Path) -> None:
    name, data = site_of.wheel("flashinfer-python", "0.6.4", files=FILES)
    site.add((name, data), beside=False)
    wanted = artefact("flashinfer-python", "0.6.4", sha256=hashlib.sha256(data).hexdigest(), size=len(data))
    assert Releases(mine).artefact(wanted, {}).read(made.COMM) == FILES[made.COMM]
    site.requests.clear()
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / name).write_bytes(data)
    elsewhere = settings_at(tmp_path / "elsewhere", wheels=(folder,))
    assert (Releases(elsewhere).artefact(wanted, {}).path, site.requests) == (folder / name, [])
    (folder / name).write_bytes(b"another")
    assert Releases(replace(mine, wheels=(folder,))).artefact(wanted, {}).path == Path(name)
    with pytest.raises(IntegrityError) as caught:
        Releases(mine).artefact(artefact("flashinfer-python", "0.6.4"), {})
    assert str(caught.value).startswith(
        "error: `flashinfer_python-0.6.4-py3-none-any.whl` is not the file that the lock"
    )


# --- the verb ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(mine: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `builder patches` and returns its exit status, standard output and standard error."""
    monkeypatch.setattr(settings, "load", lambda: mine)

    def ran(*words: str) -> tuple[int, str, str]:
        code = cli.main(["patches", *words])
        return code, *capsys.readouterr()

    return ran


def test_releases_on_the_command_line(site: Loopback, run: Any) -> None:
    add(site, "flashinfer-python", "0.6.4", files=FILES)
    code, out, _ = run("--flashinfer", "0.6.4", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["ok"], found["sets"]) == (True, [])
    assert [(item["id"], item["state"]) for item in found["sites"] if item["set"] == "sm120"] == [("F1", "needed")]
    assert {item["version"] for item in found["sites"] + found["noted"]} == {"0.6.4"}
    assert (found["bytes_read"], found["bytes_total"], found["requests"]) == (wheel_size(site), wheel_size(site), 1)
    assert 0 < found["seconds"] < 60
    code, out, _ = run("--flashinfer", "0.6.4")
    assert (code, out.splitlines()[:4]) == (
        0,
        [
            "every patch set, as these releases are; nothing is asked for",
            "",
            "flashinfer-python 0.6.4",
            "  needed   F1",
        ],
    )


def test_an_unknown_site_of_any_set_fails_where_there_is_no_matrix(site: Loopback, run: Any) -> None:
    add(site, "flashinfer-python", "0.6.4", files={made.COMM: b"def gen_trtllm_comm_module():\n    return 1\n"})
    code, out, _ = run("--flashinfer", "0.6.4", "--json")
    assert (code, json.loads(out)["ok"]) == (3, False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [],
            "neither MATRIX nor a release is named\n  hint: `builder patches MATRIX`, or `builder patches --sglang V …`",
        ),
        (["cu130", "--sglang", "0.5.9"], "MATRIX and releases at once"),
        (["--sglang", "0.5.9", "--diff"], "`--diff` without MATRIX\n  because: a matrix says which sets are applied"),
        (["--flashinfer", "0.6.4", "--models"], "`--models` looks at sglang\n  hint: name its release: `--sglang V`"),
        (["--sglang", "0.5.9", "--index", "x=http://x"], "`--index x=…` without MATRIX\n  hint: `--index default=URL`"),
    ],
)
def test_wrong_usage(run: Any, words: list[str], said: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {said.removesuffix(' …`')}")


def test_the_exit_statuses_of_what_goes_wrong(site: Loopback, run: Any) -> None:
    assert run("--sglang", "0.5.9")[0] == 5
    path = f"/{add(site, 'flashinfer-python', '0.6.4', files=FILES).removeprefix(site.url + '/')}"
    assert run("--flashinfer", "0.6.5")[0] == 2
    site.files[path].data = site_of.wheel("flashinfer-python", "0.6.4", files={made.COMM: b""})[1]
    assert run("--flashinfer", "0.6.4")[0] == 7


def test_models_of_a_release(site: Loopback, run: Any) -> None:
    files = {file: text.encode() for file, text in made.SGLANG.items()}
    filler = {f"sglang/data/{n}.bin": bytes(400_000) for n in range(2)}
    add(site, "sglang", "0.5.9", files={"sglang/data/x.bin": bytes(900_000), **files, **filler})
    code, out, _ = run("--sglang", "0.5.9", "--models", "--json")
    found = json.loads(out)
    assert (code, found["package"], found["version"]) == (0, "sglang", "0.5.9")
    assert [(item["class"], item["state"]) for item in found["models"]] == [
        ("KimiK25ForConditionalGeneration", "wraps")
    ]
    assert found["requests"] == 2, "the end of the wheel, and all of its models at once"
    code, out, _ = run("--sglang", "0.5.9", "--models")
    assert (code, out.splitlines()[0]) == (0, "sglang 0.5.9")
    assert out.splitlines()[-1].startswith("nothing fetched of ")


def test_what_the_sites_read_is_fetched_in_one_go(site: Loopback, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the sites: no member is asked for by itself, but those that a site's context names."""
    monkeypatch.setitem(apply.SETS, "sm120-symm", ())
    files = {file: text.encode() for file, text in made.SGLANG.items()}
    filler = {f"sglang/data/{n}.bin": bytes([n]) * 400_000 for n in range(3)}
    add(site, "sglang", "0.5.9", files={**filler, **files, "sglang/data/z.bin": bytes(400_000)})
    found = json.loads(run("--sglang", "0.5.9", "--json")[1])
    assert found["requests"] <= 3
    assert found["bytes_read"] < found["bytes_total"] / 2
