"""The matrix: what is read, what is refused, and the whole text of every refusal."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from builder.errors import ExitCode, UsageError
from builder.matrix import (
    LoadedMatrix,
    Matrix,
    MatrixError,
    find_matrix,
    list_matrices,
    load,
    load_matrix,
    parse_matrix,
    schema_text,
)
from tests.made import SMALL

ROOT = Path(__file__).resolve().parents[2]
MATRICES = ROOT / "matrices"

DIGEST = "sha256:" + "0123456789abcdef" * 4

FULL: dict[str, Any] = {
    "summary": "every field",
    "as_of": "2026-03-01",
    "platform": "linux/amd64",
    "python": "3.11",
    "base": {"kind": "archive", "distribution": "debian", "release": "bookworm", "packages": ["g++"]},
    "cuda": {
        "version": "13.0.1",
        "jit": "nvcc",
        "compiler": {
            "nvidia-cuda-nvcc": "13.0.88",
            "nvidia-nvvm": "13.0.88",
            "nvidia-cuda-crt": "13.0.88",
            "nvidia-cuda-cccl": "13.0.85",
        },
    },
    "gpus": ["12.0", "9.0"],
    "stack": {
        "torch": "2.9.1+cu130",
        "sgl-kernel": "0.3.21+cu130",
        "flashinfer": {"python": "0.6.4", "cubin": "none"},
        "sglang": "0.5.9",
    },
    "extras": ["torchvision==0.24.1"],
    "prereleases": ["compressed-tensors"],
    "indexes": {"site": {"url": "https://wheels.example/cu130", "packages": ["torch"]}},
    "files": [
        {
            "name": "sgl-kernel",
            "version": "0.3.21+cu130",
            "url": "https://wheels.example/sgl_kernel-0.3.21%2Bcu130-cp310-abi3-manylinux2014_x86_64.whl",
            "sha256": "4be1" * 16,
            "size": 1000,
            "attested_by": ["index commit 192beef"],
            "requires": ['filelock>=3.13; python_version >= "3.9"'],
            "metadata_version": "0.3.21",
        }
    ],
    "overrides": [
        {
            "package": "flashinfer-python",
            "pin": "==0.6.3",
            "ours": "0.6.4",
            "because": "sglang checks a lower bound only",
            "source": "facts/stacks.md section 1",
            "runtime_check": ">=0.6.3",
        }
    ],
    "patches": {
        "sm120": {"symm_mem": "opt-in", "allreduce_fusion": "off"},
        "eagle3": {"multimodal": "opt-in"},
        "diffs": [{"package": "sglang", "file": "patches/mine.diff", "sha256": "ab" * 32}],
    },
    "environment": {"SGLANG_LOG": "info"},
    "labels": {"com.example.team": "inference"},
    "budget": {"image": "13 GB"},
    "stand_in": {
        "packages": ["sgl-kernel"],
        "because": "sglang-kernel 0.4.2 under another name",
        "differences": [
            {
                "id": "stand-in-one",
                "distribution": "sgl-kernel",
                "file": "sgl_kernel/*.so",
                "checks": ["load"],
                "words": "undefined symbol",
                "consequence": "none in a test",
            }
        ],
    },
}
FULL_IMAGE = {
    **{key: value for key, value in FULL.items() if key != "stand_in"},
    "base": {"kind": "image", "reference": f"debian@{DIGEST}", "distribution": "debian", "release": "bookworm"},
    "stack": {"torch": "2.11.0", "sglang-kernel": "0.4.4", "flashinfer": "0.6.12", "sglang": "0.5.15.post1"},
    "files": [],
    "overrides": [],
}


def parse(text: str, name: str = "x") -> LoadedMatrix:
    if '"stand_in"' in text:
        name += "-standin"
    return parse_matrix(text, Path(f"matrices/{name}.yaml"))


def refusal(text: str) -> str:
    with pytest.raises(MatrixError) as caught:
        parse(text)
    assert caught.value.exit_code is ExitCode.USAGE
    return str(caught.value)


# --- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", list_matrices(MATRICES), ids=lambda path: path.stem)
def test_checked_in_matrices_are_valid_and_fit_their_schema(path: Path) -> None:
    assert load_matrix(path).name == path.stem
    text = path.read_text()
    assert text.splitlines()[0] == "# yaml-language-server: $schema=matrix.schema.json"
    yaml = YAML(typ="safe", pure=True)
    Draft202012Validator(json.loads(schema_text())).validate(
        yaml.load(text) | {"as_of": load_matrix(path).as_of.isoformat()}
    )


def test_default_matrix_has_the_pins_of_its_name() -> None:
    matrix = load_matrix(MATRICES / "cu130-next.yaml")
    assert matrix.stack.pins() == {
        "torch": "2.11.0",
        "sglang-kernel": "0.4.4",
        "flashinfer-python": "0.6.12",
        "flashinfer-cubin": "0.6.12",
        "sglang": "0.5.15.post1",
    }
    assert (matrix.cuda.version, matrix.cuda.minor, matrix.python, matrix.gpus) == (
        "13.0.2",
        "13.0",
        "3.11",
        ("12.0", "9.0"),
    )


def test_small_matrix_takes_its_name_from_the_file_and_every_default() -> None:
    matrix = parse(SMALL, "tiny-1.2_x").matrix
    assert matrix.name == "tiny-1.2_x"
    assert matrix.as_of == date(2026, 3, 1)
    assert matrix.patches.sm120 is None
    assert matrix.budget is None
    assert (matrix.extras, matrix.files, matrix.overrides) == ((), (), ())


def test_every_field_can_be_written_and_read() -> None:
    matrix = parse(json.dumps(FULL, indent=1)).matrix
    assert matrix.stack.pins() == {
        "torch": "2.9.1+cu130",
        "sgl-kernel": "0.3.21+cu130",
        "flashinfer-python": "0.6.4",
        "sglang": "0.5.9",
    }
    assert matrix.files[0].filename == "sgl_kernel-0.3.21+cu130-cp310-abi3-manylinux2014_x86_64.whl"
    assert matrix.budget is not None and matrix.budget.image == 13 * 10**9
    assert parse(json.dumps(FULL_IMAGE, indent=1)).matrix.stack.kernel == ("sglang-kernel", "0.4.4")


def test_version_of_a_file_comes_from_its_name_where_none_is_written() -> None:
    written = copy.deepcopy(FULL)
    del written["files"][0]["version"]
    assert parse(json.dumps(written)).matrix.files[0].pinned_version == "0.3.21+cu130"


@pytest.mark.parametrize(
    ("written", "size"), [("13 GB", 13 * 10**9), ("12.5 GiB", 12.5 * 2**30), ("700MB", 7 * 10**8), ("1048576", 2**20)]
)
def test_budget_is_bytes_or_a_number_with_a_unit(written: str, size: float) -> None:
    budget = parse(SMALL + f"budget: {{image: {written}}}\n").matrix.budget
    assert budget is not None and budget.image == size


def test_yaml_1_2_has_no_yes_and_no_sexagesimals() -> None:
    text = SMALL + "environment: {A: yes, B: off, C: 12:30:45, D: 2026-01-01}\n"
    assert dict(parse(text).matrix.environment) == {"A": "yes", "B": "off", "C": "12:30:45", "D": "2026-01-01"}


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + SMALL.encode())
    assert load(path).line_of("stack", "torch") == 9


def test_lines_are_known_for_findings() -> None:
    loaded = load(MATRICES / "cu130-next.yaml")
    lines = loaded.text.splitlines()
    assert lines[loaded.line_of("cuda", "compiler", "nvidia-nvvm") - 1].strip() == "nvidia-nvvm: 13.0.88"
    assert lines[loaded.line_of("gpus", 1) - 1].startswith("gpus:")
    assert loaded.line_of("cuda", "not there") == loaded.line_of("cuda")
    assert loaded.line_of("not there") == 1
    assert loaded.where("stack", "torch").endswith(f"cu130-next.yaml:{loaded.line_of('stack', 'torch')}")


def test_matrix_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse(SMALL).matrix.summary = "x"  # type: ignore[misc]


# --- what is refused: the YAML ---------------------------------------------------------------------------------------


def change_small(lines: list[str]) -> str:
    """The small matrix with the `-` lines replaced by the `+` lines, or with these added at its end."""
    old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] == sign) for sign in "-+")
    if not old:
        return SMALL + new
    assert SMALL.count(old) == 1
    return SMALL.replace(old, new)


REFUSALS = Path(__file__).with_name("matrix_refusals.md")
CASE = re.compile(r"## (.+)\n\n```(yaml|diff)\n((?:.*\n)*?)```\n\n```text\n((?:.*\n)*?)```\n")
CASES = CASE.findall(REFUSALS.read_text())


@pytest.mark.parametrize(("name", "kind", "written", "message"), CASES, ids=[case[0] for case in CASES])
def test_refusal(name: str, kind: str, written: str, message: str) -> None:
    told = refusal(written if kind == "yaml" else change_small(written.splitlines())) + "\n"
    if os.environ.get("BUILDER_UPDATE"):
        text = REFUSALS.read_text()
        REFUSALS.write_text(
            text.replace(f"{written}```\n\n```text\n{message}```", f"{written}```\n\n```text\n{told}```")
        )
    else:
        assert told == message


def test_every_refusal_is_read() -> None:
    assert len(CASES) == REFUSALS.read_text().count("\n## ")
    assert len({case[0] for case in CASES}) == len(CASES)


def test_a_control_character_is_not_echoed() -> None:
    assert refusal("summary: \x07\n") == (
        "error: character U+0007 is not allowed in YAML\n  at: matrices/x.yaml:1:10\n"
        "  1 | summary: \N{REPLACEMENT CHARACTER}\n    |          ^\n  hint: remove it"
    )


def test_nesting_has_a_limit() -> None:
    expected = f"error: nested more than 32 deep\n  at: matrices/x.yaml:1:34\n  1 | {'[' * 40}\n    | {' ' * 33}^"
    assert refusal("[" * 40) == expected
    assert refusal("[" * 100_000).startswith("error: nested more than 32 deep")


def test_duplicate_and_empty_keys_are_told_together_with_other_problems() -> None:
    text = SMALL.replace("  torch: 2.11.0\n", "  torch: 2.11.0\n  torch: 2.12.0\n  sglang:\n") + "extra: []\n"
    assert refusal(text) == (
        "error: `stack.torch` is set twice\n"
        "  at: matrices/x.yaml:10:3\n"
        "  10 |   torch: 2.12.0\n"
        "     |   ^^^^^\n"
        "  hint: it is first set on line 9: keep one of the two\n"
        "\n"
        "error: `stack.sglang` has no value\n"
        "  at: matrices/x.yaml:11:3\n"
        "  11 |   sglang:\n"
        "     |   ^^^^^^\n"
        "  hint: give it a value (`{}` for an empty mapping), or remove it\n"
        "\n"
        "error: `extra` is not a known key\n"
        "  at: matrices/x.yaml:12:1\n"
        "  12 | extra: []\n"
        "     | ^^^^^\n"
        "  allowed: as_of, base, budget, cuda, environment, extras, files, gpus, indexes, labels, overrides, patches,"
        " platform, prereleases, python, stack, stand_in, summary\n"
        "  hint: did you mean `extras`\n"
        "\n"
        "error: 3 problems in `matrices/x.yaml`"
    )


def test_aliases_cannot_blow_up() -> None:
    bomb = "a: &a [x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20)
    )
    assert refusal(bomb).startswith("error: anchors and aliases")


def test_a_great_many_problems_are_counted_and_the_first_are_shown() -> None:
    lines = refusal(SMALL + "".join(f"k{i}: 1\n" for i in range(300))).splitlines()
    assert lines.count("") == 100
    assert lines[-1] == "error: 300 problems in `matrices/x.yaml`, of which the first 100 are shown"


def test_many_values_are_refused_early() -> None:
    assert refusal("extras: [" + "a," * 30_000 + "]").startswith("error: more than 20000 values\n")


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    path.write_bytes(b"#" * (1024 * 1024 + 1))
    with pytest.raises(UsageError) as caught:
        load(path)
    assert str(caught.value) == f"error: `{path}` is too large\n  because: it has more than 1048576 bytes (1 MiB)"


def test_a_file_that_is_not_utf_8_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"python: x\nsummary: caf\xe9\n")
    with pytest.raises(UsageError) as caught:
        load(path)
    assert str(caught.value) == f"error: byte 0xe9 is not UTF-8\n  at: {path}:2:13\n  hint: save the file as UTF-8"


@pytest.mark.parametrize("name", ["Big", "a b", "-x", "a" * 64])
def test_a_file_name_has_to_name_a_matrix(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(SMALL, name)
    assert str(caught.value) == (
        f"error: `{name if len(name) < 60 else name[:59] + '…'}` cannot name a matrix\n  at: matrices/{name}.yaml\n"
        "  because: allowed: a-z, 0-9, `.`, `_` and `-`, at most 63, as it names a matrix and a tag"
    )


# --- what is refused: the fields -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "torch"}, "`files[0].url`: the file is `sgl-kernel`'s, the entry says `torch`"),
        ({"version": "0.3.20"}, "`files[0].url`: the file is version `0.3.21+cu130`, the entry says `0.3.20`"),
        ({"url": "https://wheels.example/x.zip"}, "`files[0].url`: `x.zip` is not a wheel's file name"),
        (
            {"url": "https://wheels.example/x.whl?token=1"},
            "`files[0].url`: `https://wheels.example/x.whl?token=1` has a query",
        ),
        (
            {"requires": ["a @ https://wheels.example/x.whl"]},
            "`files[0].requires[0]`: `a @ https://wheels.example/x.whl` has a URL",
        ),
        ({"size": 0}, "`files[0].size`: input should be greater than 0"),
    ],
)
def test_a_direct_file_has_to_be_what_it_says(change: dict[str, Any], message: str) -> None:
    written = copy.deepcopy(FULL)
    written["files"][0] |= change
    assert refusal(json.dumps(written, indent=1)).splitlines()[0] == f"error: {message}"


def test_everything_wrong_is_told_at_once_in_the_order_of_the_file() -> None:
    text = (
        SMALL.replace('"3.11"', "3.11")
        .replace("2.11.0", "2.10")
        .replace("13.0.2", "13")
        .replace("linux/amd64", "linux/arm64")
    )
    with pytest.raises(MatrixError) as caught:
        parse(text)
    assert [(problem.mark.line, problem.field) for problem in caught.value.problems] == [
        (3, "platform"),
        (4, "python"),
        (6, "cuda.version"),
        (9, "stack.torch"),
    ]


def test_a_secret_is_not_in_the_traceback_either() -> None:
    with pytest.raises(MatrixError) as caught:
        parse(SMALL + "indexes: {a: {url: 'https://me:s3cret@wheels.example/a', packages: [torch]}}\n")
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


# --- nothing a matrix says can add an instruction --------------------------------------------------------------------

EVIL = ["\nRUN evil", "\r\nRUN evil", "\u2028RUN evil", "\x85RUN evil", "\x00", "\x1b[2J", "\n"]


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of every string in ``value``, and of every key of a mapping whose keys are free."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict):
        for key, inner in value.items():
            if path in (("environment",), ("labels",), ("indexes",), ("cuda", "compiler")):
                yield (*path, key, "[key]")
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from leaves(inner, (*path, i))


def poisoned(matrix: dict[str, Any], path: tuple[str | int, ...], evil: str, *, front: bool = False) -> str:
    written: Any = copy.deepcopy(matrix)
    holder = written
    *above, last = path[:-1] if path[-1] == "[key]" else path
    for element in above:
        holder = holder[element]
    if path[-1] == "[key]":
        holder[f"{last}{evil}"] = holder.pop(last)
    else:
        holder[last] = evil + holder[last] if front else holder[last] + evil
    return json.dumps(written, indent=1)


EVERY_LEAF = [(FULL, path) for path in leaves(FULL)] + [
    (FULL_IMAGE, path) for path in leaves(FULL_IMAGE) if path[0] == "base"
]


@pytest.mark.parametrize(
    ("matrix", "path"), EVERY_LEAF, ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else ""
)
def test_no_string_takes_a_line_break_or_a_control_character(
    matrix: dict[str, Any], path: tuple[str | int, ...]
) -> None:
    texts = [poisoned(matrix, path, evil) for evil in EVIL]
    for text in [*texts, poisoned(matrix, path, "\nRUN evil", front=True)]:
        with pytest.raises(MatrixError) as caught:
            parse(text)
        problem = caught.value.problems[0]
        name = "x-standin" if "stand_in" in matrix else "x"
        assert f"matrices/{name}.yaml:{problem.mark.line}:" in str(caught.value)
        assert problem.mark.line > 1
        assert problem.field.split(".")[0].split("[")[0] == path[0]
        assert all(line.isprintable() for line in str(caught.value).split("\n"))


def test_every_field_of_the_model_is_in_the_two_full_matrices() -> None:
    """Else the test above would miss a new field."""
    schema = json.loads(schema_text())

    def used(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield key
                yield from used(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from used(inner)

    written = {*used(FULL), *used(FULL_IMAGE)}
    models = [schema, *schema["$defs"].values(), schema["$defs"]["Flashinfer"]["anyOf"][1]]
    assert {key for model in models for key in model.get("properties", {})} <= written


@pytest.mark.parametrize("evil", ['"', "$(id)", "${HOME}", "`id`", "\\"])
@pytest.mark.parametrize("path", [("summary",), ("environment", "SGLANG_LOG"), ("labels", "com.example.team")])
def test_what_reaches_an_instruction_has_nothing_to_expand(path: tuple[str | int, ...], evil: str) -> None:
    assert 'allowed: printable ASCII without " $ \\ `' in refusal(poisoned(FULL, path, evil))


# --- finding a matrix ------------------------------------------------------------------------------------------------


def test_a_matrix_is_a_name_or_a_path(tmp_path: Path) -> None:
    (tmp_path / "cu130.yaml").write_text(SMALL)
    assert find_matrix("cu130", tmp_path) == tmp_path / "cu130.yaml"
    assert find_matrix(str(tmp_path / "cu130.yaml"), Path("elsewhere")) == tmp_path / "cu130.yaml"


def test_an_unknown_name_tells_the_known_ones(tmp_path: Path) -> None:
    for name in ("cu128", "cu130", "cu130-next"):
        (tmp_path / f"{name}.yaml").write_text(SMALL)
    (tmp_path / "matrix.schema.json").write_text("{}")
    with pytest.raises(UsageError) as caught:
        find_matrix("cu130-nxt", tmp_path)
    assert str(caught.value) == (
        f"error: there is no matrix `cu130-nxt`\n  because: `{tmp_path}` has `cu128`, `cu130`, `cu130-next`\n"
        "  hint: did you mean `cu130-next`"
    )


@pytest.mark.parametrize("name", ["../etc/passwd", "nowhere.yaml", "a\0b.yaml", "x/" * 2000])
def test_a_path_that_is_not_there_is_a_usage_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        find_matrix(name, tmp_path)


def test_a_folder_without_matrices(tmp_path: Path) -> None:
    assert list_matrices(tmp_path / "none") == []
    with pytest.raises(UsageError) as caught:
        find_matrix("a", tmp_path)
    assert str(caught.value) == (
        f"error: there is no matrix `a`\n  because: `{tmp_path}` has none\n"
        "  hint: name one of them, or give a path to a file of your own"
    )


def test_a_folder_is_not_a_matrix(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path)
    assert str(caught.value) == f"error: `{tmp_path}` is not a file"


# --- the schema ------------------------------------------------------------------------------------------------------


def test_every_field_of_the_schema_has_a_title_and_a_description() -> None:
    schema = json.loads(schema_text())
    Draft202012Validator.check_schema(schema)
    for model in [schema, *schema["$defs"].values()]:
        assert model["title"] and model["description"]
        for name, body in model.get("properties", {}).items():
            assert body.get("title"), name
            assert body.get("description"), name


@pytest.mark.parametrize("matrix", [FULL, FULL_IMAGE], ids=["archive", "image"])
def test_schema_and_model_agree(matrix: dict[str, Any]) -> None:
    validator = Draft202012Validator(json.loads(schema_text()))
    validator.validate(matrix)
    changes: list[dict[str, Any]] = [
        {"name": "x"},
        {"budget": None},
        {"gpus": []},
        {"environment": {"lower": "x"}},
        {"python": 3.11},
    ]
    for change in changes:
        assert not validator.is_valid(matrix | change)
        with pytest.raises(MatrixError):
            parse(json.dumps(matrix | change))


# --- any text at all -------------------------------------------------------------------------------------------------

PROPERTY = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
KEYS = st.sampled_from(sorted(FULL)) | st.text(max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.dates().map(str),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=10,
)


def matrix_or_usage_error(text: str) -> None:
    try:
        loaded = parse(text)
    except UsageError as error:
        assert str(error).startswith("error: ")
    else:
        assert isinstance(loaded.matrix, Matrix)


@PROPERTY
@given(st.text())
def test_any_text_is_a_matrix_or_a_usage_error(text: str) -> None:
    matrix_or_usage_error(text)


@PROPERTY
@given(st.text(alphabet="ab1.0:- \n\t\"'[]{}#&*!|>%@`?,~\\x", max_size=60))
def test_anything_like_yaml_is_a_matrix_or_a_usage_error(text: str) -> None:
    matrix_or_usage_error(text)


@PROPERTY
@given(st.integers(0, len(SMALL)), st.integers(0, 20), st.text(max_size=10))
def test_a_valid_matrix_with_a_hole_is_a_matrix_or_a_usage_error(start: int, length: int, text: str) -> None:
    matrix_or_usage_error(SMALL[:start] + text + SMALL[start + length :])


@PROPERTY
@given(st.dictionaries(KEYS, VALUES, max_size=6))
def test_any_values_are_a_matrix_or_a_usage_error(values: dict[str, Any]) -> None:
    matrix_or_usage_error(json.dumps({**FULL, **values}))


@PROPERTY
@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_matrix_or_a_usage_error(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(data)
    try:
        load(path)
    except UsageError as error:
        assert str(error).startswith("error: ")
