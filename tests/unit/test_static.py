"""`builder check` and what the wheels of a lock say: wheels of an index on loopback, with libraries that the compiler made."""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from urllib3.util.retry import Retry

from builder import cli, settings
from builder.errors import ExitCode
from builder.lock import Artefact, lock_path, write_lock
from builder.matrix import load
from builder.settings import Settings
from builder.static import gpucode
from builder.static.__main__ import main as make_table
from builder.static.gpucode import has_gpu_code, pack, unpack
from tests.loopback import Loopback, loopback, wheel
from tests.made import golden, lock_of, settings_at
from tests.unit.fatbin_made import A, container, cubin, entry, module
from tests.unit.smoke_made import compile_library
from tests.unit.test_abiverb import ABI3, CHECK, CHECK_NOW, TAG, cudart, kernel, library, torch

# Processes and servers of their own: `make processes`.
pytestmark = pytest.mark.processes

MATRIX = """\
summary: A stack of made-up wheels
as_of: 2026-03-01
platform: linux/amd64
python: "3.11"
base: {kind: archive, distribution: debian, release: bookworm}
cuda: {version: 12.8.1, jit: none}
gpus: ["12.0", "9.0"]
stack: {}
budget: {image: 13 GB}
extras: [kernel==0.3.21]
"""


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loopback]:
    monkeypatch.setattr(Retry, "get_backoff_time", lambda _: 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with loopback() as site:
        yield site


@pytest.fixture
def site(index: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    made = settings_at(tmp_path, index=f"{index.url}/simple/")
    monkeypatch.setattr(settings, "load", lambda: made)
    return made


def locked(index: Loopback, made: tuple[str, bytes], *requires: str, direct: bool = False) -> Artefact:
    """The lock entry of a wheel that is put on the index."""
    file, data = made
    url = index.add(made)
    name, version = file.split("-")[:2]
    return Artefact(
        name=name.replace("_", "-"),
        version=version,
        metadata_version=version,
        file=file,
        sha256=hashlib.sha256(data).hexdigest(),
        size=None if direct else len(data),
        index=None if direct else "default",
        url=url if direct else None,
        requires=requires,
        layer="rest",
    )


def write(folder: Path, *wheels: Artefact, **changes: str) -> Path:
    """A matrix with its lock."""
    text = MATRIX
    for key, value in changes.items():
        old = next(line for line in text.splitlines() if line.startswith(f"{key}:"))
        text = text.replace(old, f"{key}: {value}")
    path = folder / "made.yaml"
    path.write_text(text, encoding="utf-8")
    write_lock(lock_of(load(path).matrix, *wheels), lock_path(path))
    return path


def said(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> tuple[int, str]:
    """Exit status and text, without what differs from run to run."""
    code = cli.main(["check", str(path), *options])
    out, err = capsys.readouterr()
    assert "error:" not in err, err
    text = out.replace(str(path), "made.yaml")
    return code, re.sub(r", \d+ rules", ", N rules", re.sub(r"(read|nothing was read).* s\n", "read N\n", text))


def ours(text: str) -> str:
    """What is said of the wheels, and the last line: what the rules say is in their own tests."""
    blocks = re.split(r"\n(?! )", text)
    return "\n".join(block for block in blocks if re.search(r"\[(link|arch|wheel)-[a-z-]+\]\n|^made: |^$", block))


def data(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> tuple[int, dict[str, object]]:
    code = cli.main(["check", str(path), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def of_torch(index: Loopback, version: str, name: str) -> list[Artefact]:
    runtime = locked(index, cudart("nvidia-cuda-runtime-cu12", "12.8.90", 12))
    return [locked(index, torch(version, name), "nvidia-cuda-runtime-cu12==12.8.90"), runtime]


# --- linking ----------------------------------------------------------------------------------------------------------


def test_a_kernel_of_another_torch(
    index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The release that fits is looked for on the index."""
    fitting = library("", wants=(CHECK_NOW,), needed=("libc10.so", "libcudart.so.12"))
    index.add(kernel("0.3.22", ops=fitting))
    path = write(tmp_path, locked(index, kernel()), *of_torch(index, "2.10.0", CHECK_NOW))
    code, text = said(capsys, path)
    golden("check_kernel.txt", ours(text))
    assert code == ExitCode.FINDINGS


def test_a_release_that_requires_another_torch_does_not_fit(
    index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fitting = library("", wants=(CHECK_NOW,), needed=("libc10.so", "libcudart.so.12"))
    index.add(kernel("0.3.22", ["torch==2.99"], ops=fitting))
    index.add(kernel("0.3.23", ["torch>=2.10"], ops=fitting))
    path = write(tmp_path, locked(index, kernel()), *of_torch(index, "2.10.0", CHECK_NOW))
    assert "  hint: write `kernel==0.3.23` under `extras`; " in said(capsys, path)[1]


def test_no_release_fits(index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, locked(index, kernel()), *of_torch(index, "2.10.0", CHECK_NOW))
    assert (
        "  hint: no release of kernel near 0.3.21 fits, and no torch from 2.6.0 on: leave kernel out\n"
        in said(capsys, path)[1]
    )


def test_a_lock_that_is_fine_is_looked_at_once(
    index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, locked(index, kernel()), *of_torch(index, "2.9.1", CHECK))
    first = said(capsys, path)
    golden("check_fine.txt", first[1])
    asked = len(index.requests)
    assert said(capsys, path) == first
    assert len(index.requests) == asked > 0


def test_an_answer_is_of_one_matrix(
    index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another line moves what findings point to."""
    wheels = [locked(index, kernel()), *of_torch(index, "2.10.0", CHECK_NOW)]
    path = write(tmp_path, *wheels)
    assert "  at: made.yaml:10\n" in said(capsys, path)[1]
    path.write_text(f"# Moved.\n{path.read_text(encoding='utf-8')}", encoding="utf-8")
    assert "  at: made.yaml:11\n" in said(capsys, path)[1]


def test_a_wheel_of_another_cuda(
    index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = locked(index, cudart("nvidia-cuda-runtime", "13.0.96", 13))
    made = locked(index, torch("2.11.0", CHECK, 13), "nvidia-cuda-runtime==13.0.96")
    path = write(tmp_path, locked(index, kernel()), made, runtime, cuda="{version: 13.0.2, jit: none}")
    code, text = said(capsys, path)
    golden("check_cuda.txt", ours(text))
    assert code == ExitCode.FINDINGS


def test_the_rules_alone(index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, locked(index, kernel()), *of_torch(index, "2.10.0", CHECK_NOW))
    assert said(capsys, path, "--no-wheels") == (0, "made: fine, N rules over 3 wheels; no wheel was looked at\n")
    assert index.requests == []


# --- what cannot be looked at -----------------------------------------------------------------------------------------


def test_an_index_that_does_not_answer(
    index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rules' findings are printed all the same."""
    path = write(tmp_path, locked(index, kernel()), *of_torch(index, "2.9.1", CHECK), python='"3.12"')
    lines = path.read_text(encoding="utf-8")
    path.write_text(
        lines.replace('"3.12"', '"3.11"').replace("as_of: 2026-03-01", "as_of: 2199-01-01"), encoding="utf-8"
    )
    write_lock(lock_of(load(path).matrix, locked(index, kernel()), *of_torch(index, "2.9.1", CHECK)), lock_path(path))
    for served in index.files.values():
        served.status = 503
    code, text = said(capsys, path)
    assert code == ExitCode.FINDINGS
    assert text.startswith("error: `as_of` is 2199-01-01")
    assert "note: kernel 0.3.21" in text and "not looked at [wheel-unread]\n" in text

    path.write_text(path.read_text(encoding="utf-8").replace("2199", "2026"), encoding="utf-8")
    write_lock(lock_of(load(path).matrix, locked(index, kernel()), *of_torch(index, "2.9.1", CHECK)), lock_path(path))
    for served in index.files.values():
        served.status = 503
    assert said(capsys, path)[0] == ExitCode.UNREACHABLE
    for served in index.files.values():
        served.status = 200
    code, text = said(capsys, path)
    assert (code, "wheel-unread" in text) == (0, False)


def test_a_direct_file_that_cannot_be_reached(
    index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels = [locked(index, kernel()), *of_torch(index, "2.9.1", CHECK)]
    wheels[1] = locked(index, torch("2.9.1", CHECK), "nvidia-cuda-runtime-cu12==12.8.90", direct=True)
    index.files[f"/simple/files/{wheels[1].file}"].status = 404
    # The site has a mirror of it neither.
    index.files["/simple/torch/"].status = 404
    path = write(tmp_path, *wheels)
    code, text = said(capsys, path)
    golden("check_unread.txt", ours(text).replace(index.url.removeprefix("http://"), "127.0.0.1:N"))
    assert code == 0
    assert said(capsys, path, "--strict")[0] == ExitCode.FINDINGS
    index.files[f"/simple/files/{wheels[1].file}"].status = 200
    _, text = said(capsys, path)
    assert "wheel-unread" not in text
    assert "torch 2.9.1 was read in parts, at its own URL [wheel-unproven]" in text


def test_a_direct_file_that_was_replaced(
    index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its size tells, where that is stated."""
    wheels = [locked(index, kernel()), *of_torch(index, "2.9.1", CHECK)]
    wheels[1] = locked(index, torch("2.9.1", CHECK), direct=True).model_copy(update={"size": 1234})
    index.files["/simple/torch/"].status = 404
    code, text = said(capsys, write(tmp_path, *wheels))
    assert code == ExitCode.FINDINGS
    assert "error: torch 2.9.1: not the file that the lock pins [wheel-replaced]\n" in text
    assert "  hint: take what is there now: `builder lock made --repin torch`\n" in text


def test_a_cache_that_cannot_be_used_is_no_unread_wheel(
    index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.cache.parent.mkdir(exist_ok=True)
    site.cache.write_text("a file")
    path = write(tmp_path, locked(index, kernel()), *of_torch(index, "2.9.1", CHECK))
    assert cli.main(["check", str(path)]) == ExitCode.USAGE
    assert "error: the cache cannot be used\n" in capsys.readouterr().err


def test_a_library_that_no_wheel_has(
    index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be in a wheel that was not looked at; in none, where all were."""
    lonely = kernel(ops=library("", ("ops",), needed=("libtorch_mine.so",)))
    other = wheel("other", "1.0", tag=TAG, files={"other/a.so": library("", ("a",))})
    wheels = [locked(index, lonely), locked(index, other, direct=True)]
    index.files[f"/simple/files/{other[0]}"].status = 404
    index.files["/simple/other/"].status = 404
    path = write(tmp_path, *wheels)
    code, text = said(capsys, path)
    assert (code, "which may need it" in text) == (0, True)
    index.files[f"/simple/files/{other[0]}"].status = 200
    code, text = said(capsys, path)
    assert code == ExitCode.FINDINGS
    assert "error: kernel 0.3.21 needs `libtorch_mine.so`, which no wheel of the lock has [link-broken]\n" in text
    assert (
        "  hint: add the package that has it to `extras`, or leave kernel out; then lock again: `builder lock made`\n"
        in text
    )


def test_what_an_unproven_file_says_is_not_kept_as_the_pinned_one_s(
    index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right, wrong = torch("2.9.1", CHECK), torch("2.9.1", CHECK_NOW)
    wheels = [locked(index, kernel()), *of_torch(index, "2.9.1", CHECK)]
    wheels[1] = locked(index, right, "nvidia-cuda-runtime-cu12==12.8.90", direct=True)
    index.files[f"/simple/files/{right[0]}"].data = wrong[1]
    index.files["/simple/torch/"].status = 404
    path = write(tmp_path, *wheels)
    code, text = said(capsys, path)
    assert (code, "[link-broken]" in text, "[wheel-unproven]" in text) == (3, True, True)
    # What was read of it is kept, and proven by that no more: asked anew, the note is still there.
    path.write_text(f"# Again.\n{path.read_text(encoding='utf-8')}", encoding="utf-8")
    code, text = said(capsys, path)
    assert (code, "[link-broken]" in text, "[wheel-unproven]" in text) == (3, True, True)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / right[0]).write_bytes(right[1])
    code, text = said(capsys, path, "--wheels", str(tmp_path / "here"))
    assert (code, "[link-broken]" in text, "[wheel-unproven]" in text) == (0, False, False)


def test_a_folder_of_wheels(
    index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = torch("2.9.1", CHECK)
    wheels = [locked(index, kernel()), *of_torch(index, "2.9.1", CHECK)]
    wheels[1] = locked(index, made, "nvidia-cuda-runtime-cu12==12.8.90", direct=True)
    index.files[f"/simple/files/{wheels[1].file}"].status = 404
    index.files["/simple/torch/"].status = 404
    path = write(tmp_path, *wheels)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / made[0]).write_bytes(made[1])
    code, text = said(capsys, path, "--wheels", str(tmp_path / "here"), "--strict")
    assert (code, text.splitlines()[-1].startswith("made: fine, ")) == (0, True)


def test_a_wheel_for_another_python(
    index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = wheel("other", "1.0", tag=TAG.replace("cp311", "cp312"), files={"other/a.so": library("", ("a",))})
    code, found = data(capsys, write(tmp_path, locked(index, other)))
    assert code == ExitCode.FINDINGS
    (finding,) = [f for f in found["findings"] if f["severity"] == "error"]  # type: ignore[attr-defined]
    assert finding["rule"] == "wheel-python"
    assert finding["message"] == "other 1.0 is not for Python 3.11"
    assert finding["where"].endswith("made.yaml:4")


# --- GPUs -------------------------------------------------------------------------------------------------------------


@cache
def with_code(*arches: int, needed: str = "", flags: int = A) -> bytes:
    """A library with GPU code for some architectures (as in sm_90a); it opens the driver by name."""
    with TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "code").write_bytes(container(*(entry(cubin(9), arch, flags) for arch in arches)))
        source = '#include <dlfcn.h>\nvoid *find(void *x) { return dlsym(x, "cuInit"); }\n'
        source += f'__asm__(".section .nv_fatbin,\\"a\\"\\n.incbin \\"{folder}/code\\"\\n.text");\n'
        options = ["-s"]
        if needed:
            compile_library("", f"-Wl,-soname,{needed}", "-nostdlib", name=needed, folder=place)
            options += ["-Wl,--no-as-needed", str(place / needed)]
        return compile_library(source, *options, name="made.so", folder=place / "out")


def sgl_kernel(arch: int) -> tuple[str, bytes]:
    files = {
        "sgl_kernel/sm90/common_ops.abi3.so": with_code(90),
        "sgl_kernel/sm100/common_ops.abi3.so": with_code(80, arch),
        "sgl_kernel/flash_ops.abi3.so": with_code(90),
        "sgl_kernel/plain.so": library("", ("plain",)),
    }
    return squeezed(wheel("sgl-kernel", "0.3.21", tag=ABI3, files=files))


def squeezed(made: tuple[str, bytes]) -> tuple[str, bytes]:
    """The same wheel with its members deflated, as real ones are."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(made[1])) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(zipfile.ZipInfo(info.filename, info.date_time), old.read(info), zipfile.ZIP_DEFLATED)
    return made[0].replace("-", "_", 1) if made[0].startswith("sgl-") else made[0], buffer.getvalue()


def test_a_gpu_that_a_kernel_has_no_code_for(
    index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"stack": "{torch: 2.9.1, sgl-kernel: 0.3.21}", "extras": "[]", "gpus": '["9.0", "12.1"]'}
    path = write(tmp_path, locked(index, sgl_kernel(120)), *of_torch(index, "2.9.1", CHECK), **changes)
    code, text = said(capsys, path)
    golden("check_gpu.txt", ours(text))
    assert code == ExitCode.FINDINGS


def test_gpu_code_in_files_for_another_cuda_counts_for_nothing(
    index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """bitsandbytes opens the file of torch's CUDA: that one has to have code for the GPU, whatever the others have."""
    changes = {"stack": "{torch: 2.9.1}", "extras": "[bitsandbytes==0.48.0]", "gpus": '["12.0"]'}
    for arches, code in (((120, 80), ExitCode.FINDINGS), ((80, 120), ExitCode.OK)):
        files = {
            f"bitsandbytes/libbitsandbytes_cuda{number}.so": with_code(arch, flags=0)
            for number, arch in zip((126, 128, 129), (arches[0], arches[1], arches[0]), strict=True)
        }
        made = squeezed(wheel("bitsandbytes", "0.48.0", tag=TAG, files=files))
        path = write(tmp_path, locked(index, made), *of_torch(index, "2.9.1", CHECK), **changes)
        found, text = said(capsys, path)
        assert found == code, text
        assert ("bitsandbytes 0.48.0 has no code for GPU 12.0 [arch-uncovered]" in text) is (code != ExitCode.OK)
        assert "GPU code for 12.0 in 1 file;" in text


def test_gpu_code_that_is_too_large_for_a_check(
    index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`builder arch` reads it; then a check knows."""
    monkeypatch.setattr(gpucode, "MOST", 100)
    changes = {"stack": "{torch: 2.9.1, sgl-kernel: 0.3.21}", "extras": "[]", "gpus": '["12.0"]'}
    path = write(tmp_path, locked(index, sgl_kernel(120)), *of_torch(index, "2.9.1", CHECK), **changes)
    _, text = said(capsys, path)
    assert "read it once: `builder arch sgl-kernel==0.3.21 --gpu 12.0`\n" in text
    assert cli.main(["arch", "sgl-kernel==0.3.21", "--gpu", "12.0"]) == 0
    capsys.readouterr()
    assert "arch-unread" not in said(capsys, path)[1]


def test_a_member_whose_end_tells_nothing(
    index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read where it needs CUDA's libraries, and else taken to have no GPU code."""
    monkeypatch.setattr(gpucode, "has_gpu_code", lambda *_: None)
    files = {"other/a.so": with_code(120), "other/b.so": with_code(120, needed="libcudart.so.12")}
    other = squeezed(wheel("other", "1.0", tag=TAG, files=files))
    path = write(tmp_path, locked(index, other), *of_torch(index, "2.9.1", CHECK), gpus='["12.0"]')
    _, found = data(capsys, path)
    assert found["looked_at"]["gpu_files"] == 1  # type: ignore[index]


def test_whether_a_member_has_gpu_code() -> None:
    files = {"a.so": with_code(90), "b.so": library("", ("b",)), "c.so": b"\x7fELF no names at all"}
    files["d.so"] = module([container(entry(cubin(9), 90))])
    for made in (wheel("made", "1.0", files=files), squeezed(wheel("made", "1.0", files=files))):
        with zipfile.ZipFile(io.BytesIO(made[1])) as archive:
            file = io.BytesIO(made[1])
            assert [has_gpu_code(file, archive.getinfo(name)) for name in files] == [True, False, None, True]


def test_what_the_table_keeps(index: Loopback) -> None:
    from builder.fatbin_stream import scan_stream

    found = scan_stream(iter([with_code(80, 120)]))
    kept = unpack(json.loads(json.dumps(pack([*found, *found]))))
    assert [[image.name for image in each.images] for each in kept] == [["sm_80a", "sm_120a"]] * 2


def test_the_table_is_made_from_releases_and_locks(
    index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A release that is in the table is not asked for at all, whichever of its wheels it has."""
    place = tmp_path / "table.json.z"
    artefact = locked(index, sgl_kernel(120))
    assert (
        make_table(
            ["--release", "sgl_kernel==0.3.21.0", str(write(tmp_path, artefact).with_suffix(".lock.json"))], place
        )
        == 0
    )
    table = json.loads(zlib.decompress(place.read_bytes()))
    (said,) = table["wheels"].items()
    assert said == (
        artefact.sha256,
        {
            "name": "sgl-kernel",
            "version": "0.3.21",
            "members": {
                "sgl_kernel/sm90/common_ops.abi3.so": 0,
                "sgl_kernel/sm100/common_ops.abi3.so": 1,
                "sgl_kernel/flash_ops.abi3.so": 0,
            },
        },
    )
    kinds = [[[image.name for image in each.images] for each in unpack(kind)] for kind in table["kinds"]]
    assert kinds == [[["sm_90a"]], [["sm_80a", "sm_120a"]]]
    index.requests.clear()
    again = settings_at(tmp_path / "again", index=site.index)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "load", lambda: again)
        assert make_table(["--release", "sgl-kernel==0.3.21", str(tmp_path / "made.lock.json")], place) == 0
    assert index.requests == []


def test_a_release_that_is_not_there_is_told_and_the_others_are_read(
    index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, none = tmp_path / "table.json.z", write(tmp_path).with_suffix(".lock.json")
    index.add(sgl_kernel(120))
    words = ["--release", "sgl-kernel==9.9", "--release", "sgl-kernel==0.3.21", str(none)]
    assert make_table(words, place) == 1
    assert "error: sgl-kernel has no release 9.9" in capsys.readouterr().err
    assert len(json.loads(zlib.decompress(place.read_bytes()))["wheels"]) == 1


def test_the_json(index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, locked(index, kernel()), *of_torch(index, "2.9.1", CHECK))
    code, found = data(capsys, path)
    assert code == 0
    assert {key: found[key] for key in ("ok", "matrix", "verdict")} == {"ok": True, "matrix": "made", "verdict": "ok"}
    looked_at = found["looked_at"]
    assert isinstance(looked_at, dict)
    assert {k: v for k, v in looked_at.items() if k != "rules"} == {
        "wheels": 3,
        "native_wheels": 3,
        "given": 0,
        "native_files": 4,
        "symbols": looked_at["symbols"],
        "by_design": 0,
        "verdicts": {"ok": 4, "broken": 0, "uncertain": 0},
        "gpus": ["12.0", "9.0"],
        "gpu_wheels": 0,
        "gpu_files": 0,
        "unread": [],
    }
    assert isinstance(found["bytes_read"], int) and found["bytes_read"] > 0


def test_a_direct_file_that_is_not_there_and_then_another(
    index: Loopback, site: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Why it cannot be had is part of the question: an answer to one reason is none to the other."""
    wheels = [locked(index, kernel()), *of_torch(index, "2.9.1", CHECK)]
    right = torch("2.9.1", CHECK)
    wheels[1] = locked(index, right, direct=True).model_copy(update={"size": 1234})
    index.files["/simple/torch/"].status = 404
    index.files[f"/simple/files/{right[0]}"].status = 404
    path = write(tmp_path, *wheels)
    code, text = said(capsys, path)
    assert (code, "[wheel-unread]" in text, "[wheel-replaced]" in text) == (0, True, False)
    index.files[f"/simple/files/{right[0]}"].status = 200
    code, text = said(capsys, path)
    assert (code, "[wheel-replaced]" in text) == (3, True)
