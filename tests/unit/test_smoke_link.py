"""`needed`, `symbols` and `cuda-major` on libraries made by the compiler."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from builder.elf import read_file
from builder.smoke.cuda import check_cuda_major
from builder.smoke.link import base_name, check_needed, check_symbols, demangle, nearest
from builder.smoke.load import check_load
from builder.smoke.loader import Library, Loader, read_cache
from tests.unit.smoke_made import Site, compile_library, finished, said

# Processes and servers of their own: `make processes`.
pytestmark = pytest.mark.processes


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture
def build(tmp_path: Path) -> Path:
    return tmp_path / "build"


def needed(site: Site) -> str:
    with site.native() as (native, ledger):
        return said(check_needed(native, ledger), "needed")


def symbols(site: Site) -> str:
    with site.native() as (native, ledger):
        return said(check_symbols(native, ledger), "symbols")


def library(build: Path, soname: str, source: str = "int answer(void) { return 42; }", *options: str) -> bytes:
    return compile_library(source, f"-Wl,-soname,{soname}", *options, name=soname, folder=build)


def user(
    build: Path, soname: str, *options: str, source: str = "int answer(void); int ask(void) { return answer(); }"
) -> bytes:
    return compile_library(source, str(build / soname), *options, name="user.so", folder=build)


LOOKED = (
    "  because: it is not loaded by `import torch`, and in no folder of RPATH, RUNPATH or LD_LIBRARY_PATH, the loader's cache "
    "or the default folders\n"
)


def test_library_that_runpath_finds(site: Site, build: Path) -> None:
    lib = library(build, "libx.so.1")
    ext = user(build, "libx.so.1", "-Wl,-rpath,$ORIGIN/../x.libs")
    site.wheel("x", files={"x.libs/libx.so.1": lib, "x/user.so": ext})
    with site.native() as (native, ledger):
        check = finished(check_needed(native, ledger))
    assert (check.ok, check.looked_at, check.expected) == (True, 2, 2)


def test_library_that_is_nowhere(site: Site, build: Path) -> None:
    library(build, "libx.so.1")
    site.wheel("x", files={"x/user.so": user(build, "libx.so.1")})
    assert needed(site) == (
        "error: `x/user.so` of x 1.0 needs `libx.so.1`, which nothing in the image provides [needed]\n"
        + LOOKED
        + "  hint: add the wheel or the OS package that has it, or name the file in builder/facts/exceptions.yaml"
    )


def test_library_of_a_known_os_package(site: Site, build: Path) -> None:
    library(build, "libsmoke.so.1")
    site.spec_data["facts"]["os_packages"] = {"libsmoke.so.1": "libsmoke1"}
    site.wheel("x", files={"x/user.so": user(build, "libsmoke.so.1")})
    assert needed(site) == (
        "error: `x/user.so` of x 1.0 needs `libsmoke.so.1`, which nothing in the image provides [needed]\n"
        + LOOKED
        + "  hint: `libsmoke.so.1` is in the OS package `libsmoke1`: add it to the base's packages"
    )


def test_library_of_another_cuda(site: Site, build: Path) -> None:
    library(build, "libcudart.so.12")
    site.wheel("x", files={"x/user.so": user(build, "libcudart.so.12")})
    assert needed(site) == (
        "error: `x/user.so` of x 1.0 needs `libcudart.so.12`, which nothing in the image provides [needed]\n"
        "  because: `libcudart.so.12` is CUDA 12's, the stack is CUDA 13\n"
        "  hint: take this package's build for CUDA 13"
    )


def test_library_that_lies_where_the_loader_does_not_look(site: Site, build: Path) -> None:
    lib = library(build, "libx.so.1")
    site.wheel("x", files={"x/user.so": user(build, "libx.so.1")})
    site.wheel("y", files={"y/lib/libx.so.1": lib})
    assert needed(site).splitlines()[1] == (
        "  because: `y/lib/libx.so.1` of y 1.0 has that name, but the loader does not look there"
    )


def test_driver_is_the_host_s(site: Site, build: Path) -> None:
    library(build, "libcuda.so.1", "int cuInit(int x) { return x; }")
    ext = user(build, "libcuda.so.1", source="int cuInit(int); int ask(void) { return cuInit(0); }")
    site.wheel("x", files={"x/user.so": ext})
    with site.native() as (native, ledger):
        check = finished(check_needed(native, ledger))
        stub = read_file(native.workspace.stubs / "libcuda.so.1")
        # What a linker looks for with `-lcuda`, as in a container that has a GPU.
        assert (native.workspace.stubs / "libcuda.so").resolve().name == "libcuda.so.1"
    assert (check.ok, stub.exports_names) == (True, frozenset({"cuInit"}))
    assert check.detail.endswith("the host's driver brings libcuda.so.1")


def test_library_that_the_package_opens_first(site: Site, build: Path) -> None:
    lib = library(build, "libx.so.1")
    site.wheel("x", files={"x/user.so": user(build, "libx.so.1")})
    site.wheel("y", files={"y/lib/libx.so.1": lib})
    site.spec_data["facts"]["loaded_first"] = [
        {"distribution": "x", "files": ["x/*.so"], "libraries": ["y/lib/libx.so.*"]}
    ]
    assert (needed(site), symbols(site)) == ("", "")


def bundled(site: Site, build: Path, tags: str) -> str:
    """A repaired wheel: an extension with a path to two bundled libraries, which have none to each other."""
    inner = library(build, "libinner.so.1")
    outer = user(build, "libinner.so.1", "-Wl,-soname,libouter.so.1")
    (build / "libouter.so.1").write_bytes(outer)
    path = f"-Wl,{tags},-rpath,$ORIGIN/../x.libs"
    ext = user(
        build,
        "libouter.so.1",
        path,
        "-Wl,--allow-shlib-undefined",
        source="int ask(void); int go(void) { return ask(); }",
    )
    site.wheel("x", files={"x.libs/libinner.so.1": inner, "x.libs/libouter.so.1": outer, "x/ext.so": ext})
    with site.native() as (native, ledger):
        return said(check_needed(native, ledger)) + said(check_load(native, ledger))


def test_bundled_libraries_come_with_the_file_that_has_the_path(site: Site, build: Path) -> None:
    assert bundled(site, build, "--disable-new-dtags") == ""


def test_a_path_that_is_not_inherited_does_not_bring_them(site: Site, build: Path) -> None:
    found = bundled(site, build, "--enable-new-dtags")
    assert "error: `x.libs/libouter.so.1` of x 1.0 needs `libinner.so.1`, which nothing in the image provides" in found
    assert "error: `x/ext.so` of x 1.0 does not load" in found


def test_exception_excuses_a_missing_library(site: Site, build: Path) -> None:
    library(build, "libx.so.1")
    site.wheel("kernel", files={"kernel/user.so": user(build, "libx.so.1")})
    site.exception(words="libx.so.1", file="kernel/user.so")
    with site.native() as (native, ledger):
        check = finished(check_needed(native, ledger))
    assert (check.ok, check.exceptions) == (True, ("known",))


def test_missing_file_is_said_once(site: Site, build: Path) -> None:
    site.wheel("x", files={"x/lib.so": library(build, "lib.so")})
    (site.packages / "x/lib.so").unlink()
    assert needed(site) == (
        "error: `x/lib.so` of x 1.0 is missing [needed]\n"
        "  hint: build again from the lock: RECORD names what the wheel installed"
    )
    assert symbols(site) == ""


def test_file_that_is_not_elf(site: Site) -> None:
    site.wheel("x", files={"x/lib.so": b"INPUT ( libx.so.1 )\n"})
    assert needed(site).splitlines()[0].startswith("error: `x/lib.so` of x 1.0 is not a sound ELF file: ")


def test_import_torch_that_fails(site: Site) -> None:
    site.wheel("torch", "2.11.0", {"torch/__init__.py": "raise OSError('libtorch.so: broken')\n"}, layer="torch")
    assert needed(site) == (
        "error: `import torch` fails: OSError: libtorch.so: broken [needed]\n"
        "  because: other files are looked at as if its libraries had been loaded\n"
        "  hint: the findings about torch's own files say why"
    )


def test_where_import_torch_fails_files_that_need_its_libraries_are_not_blamed(site: Site, build: Path) -> None:
    torch: dict[str, str | bytes] = {
        "torch/__init__.py": "raise OSError('broken')\n",
        "torch/lib/libx.so.1": library(build, "libx.so.1"),
    }
    site.wheel("torch", "2.11.0", torch, layer="torch")
    site.wheel("x", files={"x/user.so": user(build, "libx.so.1")})
    assert [line for line in needed(site).splitlines() if line.startswith("error")] == [
        "error: `import torch` fails: OSError: broken [needed]"
    ]
    assert symbols(site) == ""


def test_symbols_that_resolve(site: Site, build: Path) -> None:
    lib = library(build, "libx.so.1")
    ext = user(build, "libx.so.1", "-Wl,-rpath,$ORIGIN")
    site.wheel("x", files={"x/libx.so.1": lib, "x/user.so": ext})
    with site.native() as (native, ledger):
        check = finished(check_symbols(native, ledger))
    assert (check.ok, check.unit, check.detail) == (
        True,
        "symbols",
        f"in 2 of 2 shared objects, {check.detail.split(', ')[1]}",
    )
    assert check.looked_at >= 1


def test_symbol_that_nothing_exports(site: Site, build: Path) -> None:
    site.wheel(
        "x", files={"x/user.so": compile_library("int absent(void); int f(void) { return absent(); }", folder=build)}
    )
    assert symbols(site) == (
        "error: `x/user.so` of x 1.0 needs `absent`, which no library in its scope exports [symbols]\n"
        "  hint: a library that it needs is of another version, or the file expects to be loaded by another one"
    )


def test_symbol_that_only_a_weak_reference_needs(site: Site, build: Path) -> None:
    source = "int absent(void) __attribute__((weak)); int f(void) { return absent ? absent() : 0; }"
    site.wheel("x", files={"x/user.so": compile_library(source, folder=build)})
    assert symbols(site) == ""


TORCH = "namespace c10 { struct SymInt { long g(int) const; }; long SymInt::g(int x) const { return x; } }"
KERNEL = "namespace c10 { struct SymInt { long g(long) const; }; } long f(c10::SymInt *s) { return s->g(1L); }"


def kernel_of_another_torch(site: Site, build: Path) -> None:
    lib = compile_library(TORCH, "-Wl,-soname,libc10.so", name="libc10.so", folder=build, language="c++")
    options = (
        "-Wl,--no-as-needed",
        str(build / "libc10.so"),
        "-Wl,--unresolved-symbols=ignore-all",
        "-Wl,-rpath,$ORIGIN/../torch/lib",
    )
    ext = compile_library(KERNEL, *options, name="ops.so", folder=build, language="c++")
    site.wheel("torch", "2.11.0", {"torch/__init__.py": "", "torch/lib/libc10.so": lib}, layer="torch")
    site.wheel("sglang-kernel", "0.4.6", {"sgl_kernel/ops.so": ext}, layer="kernels")


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="c++filt is not installed")
def test_kernel_that_was_built_for_another_torch(site: Site, build: Path) -> None:
    kernel_of_another_torch(site, build)
    assert symbols(site) == (
        "error: `sgl_kernel/ops.so` of sglang-kernel 0.4.6 needs `c10::SymInt::g(long) const`, which torch 2.11.0 does not "
        "export [symbols]\n"
        "  because: this file was built for another torch\n"
        "    the nearest name there is: `c10::SymInt::g(int) const`\n"
        "  hint: take the version of sglang-kernel that was built for torch 2.11.0"
    )


def test_names_without_a_demangler(site: Site, build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_of_another_torch(site, build)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "needs `c10::SymInt::g`, which torch 2.11.0 does not export" in symbols(site)


def test_symbols_of_a_file_whose_library_is_missing_are_not_judged(site: Site, build: Path) -> None:
    library(build, "libx.so.1")
    site.wheel("x", files={"x/user.so": user(build, "libx.so.1")})
    with site.native() as (native, ledger):
        check = finished(check_symbols(native, ledger))
    assert check.ok
    assert check.detail.endswith("; 1 symbol of 1 file may be in libraries that are missing")


def versioned(build: Path, name: str, version: str, newest: str) -> bytes:
    """A library that has `answer` under a version, and another version besides."""
    script = build / "versions.map"
    build.mkdir(exist_ok=True)
    script.write_text(f"{version} {{ global: answer; }}; {newest} {{ global: other; }} {version};")
    source = "int answer(void) { return 1; } int other(void) { return 2; }"
    return library(build, name, source, f"-Wl,--version-script={script}")


def test_version_that_the_library_lacks(site: Site, build: Path) -> None:
    versioned(build, "libx.so.1", "X_2.38", "X_2.39")
    ext = user(build, "libx.so.1", "-Wl,-rpath,$ORIGIN")
    old = versioned(build, "libx.so.1", "X_2.17", "X_2.36")
    site.wheel("x", files={"x/libx.so.1": old, "x/user.so": ext})
    assert symbols(site) == (
        "error: `x/user.so` of x 1.0 needs version `X_2.38` of `libx.so.1`, which is not there [symbols]\n"
        "  because: the newest that `x/libx.so.1` of x 1.0 has is X_2.36: the file was built for a newer system\n"
        "  hint: take a newer base, or a build of this package for an older one (see the wheel's manylinux tag)"
    )


def test_version_that_the_library_has(site: Site, build: Path) -> None:
    lib = versioned(build, "libx.so.1", "X_2.17", "X_2.36")
    site.wheel("x", files={"x/libx.so.1": lib, "x/user.so": user(build, "libx.so.1", "-Wl,-rpath,$ORIGIN")})
    assert symbols(site) == ""


def test_cuda_major_of_packages_and_sonames(site: Site, build: Path) -> None:
    lib = library(build, "libcudart.so.13")
    site.wheel("nvidia-cudnn-cu13", files={"nvidia/libcudart.so.13": lib})
    site.wheel("x", files={"x/user.so": user(build, "libcudart.so.13")})
    with site.native() as (native, ledger):
        check = finished(check_cuda_major(native, ledger))
    assert (check.ok, check.detail) == (True, "CUDA 13: 1 package by name, 1 needed library")


def test_package_for_another_cuda(site: Site) -> None:
    site.wheel("nvidia-cudnn-cu12", "9.1")
    site.wheel("old", "1.0", requires=("nvidia-cudnn-cu12==9.1; platform_system == 'Linux'", "nvidia-cudnn-cu12-extra"))
    with site.native() as (native, ledger):
        assert said(check_cuda_major(native, ledger), "cuda-major") == (
            "error: nvidia-cudnn-cu12 9.1 is for CUDA 12, the stack is CUDA 13 [cuda-major]\n  hint: required by `old 1.0`"
        )


def test_package_that_goes_beside_either_cuda(site: Site) -> None:
    site.wheel("nvidia-cudnn-cu12", "9.1")
    site.spec_data["facts"]["cuda_packages"] = {
        **site.spec_data["facts"]["cuda_packages"],
        "both": ["nvidia-cudnn-cu12"],
    }
    with site.native() as (native, ledger):
        assert said(check_cuda_major(native, ledger)) == ""


def test_package_for_another_cuda_that_nobody_wants(site: Site) -> None:
    site.wheel("nvidia-cudnn-cu12", "9.1")
    with site.native() as (native, ledger):
        assert said(check_cuda_major(native, ledger)).splitlines()[-1] == (
            "  hint: no installed distribution requires it: take it out"
        )


def test_file_that_wants_another_cuda(site: Site, build: Path) -> None:
    library(build, "libcudart.so.12")
    site.wheel("x", files={"x/user.so": user(build, "libcudart.so.12")})
    with site.native() as (native, ledger):
        assert said(check_cuda_major(native, ledger), "cuda-major") == (
            "error: `x/user.so` of x 1.0 needs `libcudart.so.12`, of CUDA 12; the stack is CUDA 13 [cuda-major]\n"
            "  because: two CUDA runtimes in one process do not share devices, streams or memory, and the loader takes "
            "whichever it finds\n"
            "  hint: take the build of x for CUDA 13"
        )


def test_soname_that_two_majors_share_tells_nothing(site: Site, build: Path) -> None:
    library(build, "libcurand.so.10")
    site.wheel("x", files={"x/user.so": user(build, "libcurand.so.10")})
    with site.native() as (native, ledger):
        assert finished(check_cuda_major(native, ledger)).ok


def loader(program: Path, **options: object) -> Loader:
    return Loader(Library(), program=str(program), cache=Path("/nonexistent"), **options)  # type: ignore[arg-type]


def test_rpath_is_inherited_and_runpath_is_not(build: Path) -> None:
    """user → middle → libx: with DT_RPATH, the folder that `user` names serves `middle` too."""
    library(build / "x", "libx.so.1")
    for flag, found in (("--disable-new-dtags", True), ("--enable-new-dtags", False)):
        compile_library(
            "int answer(void); int m(void) { return answer(); }",
            str(build / "x/libx.so.1"),
            "-Wl,-soname,libm1.so",
            name="libm1.so",
            folder=build,
        )
        source = "int m(void); int ask(void) { return m(); }"
        options = (
            str(build / "libm1.so"),
            f"-Wl,{flag}",
            f"-Wl,-rpath,{build / 'x'}:{build}",
            "-Wl,--allow-shlib-undefined",
        )
        compile_library(source, *options, name="user.so", folder=build)
        closure = loader(Path("/proc/self/exe")).closure(build / "user.so")
        assert ("libx.so.1" not in [name for name, _ in closure.missing]) is found


def test_library_path_comes_before_runpath(build: Path) -> None:
    for folder in ("a", "b"):
        library(build / folder, "libx.so.1")
    user(build / "b", "libx.so.1", f"-Wl,-rpath,{build / 'b'}")
    state = loader(Path("/proc/self/exe"), library_path=[str(build / "a")])
    closure = state.closure(build / "b" / "user.so")
    assert str(build / "a" / "libx.so.1") in [item.path for item in closure.objects]


def test_loaded_soname_serves_whatever_file_it_came_from(build: Path) -> None:
    library(build / "x", "libx.so.1")
    user(build / "x", "libx.so.1")
    state = loader(Path("/proc/self/exe"), loaded=[str(build / "x" / "libx.so.1")])
    closure = state.closure(build / "x" / "user.so")
    assert "libx.so.1" not in [name for name, _ in closure.missing]


def test_loader_cache(tmp_path: Path) -> None:
    names = b"liba.so.1\0/lib/liba.so.1\0/lib/glibc-hwcaps/liba.so.1\0"
    start = 48 + 2 * 24
    entries = struct.pack("<iIIIQ", 0x303, start, start + 25, 0, 1 << 62) + struct.pack(
        "<iIIIQ", 0x303, start, start + 10, 0, 0
    )
    path = tmp_path / "ld.so.cache"
    path.write_bytes(b"glibc-ld.so.cache1.1" + struct.pack("<II20x", 2, len(names)) + entries + names)
    assert read_cache(path) == {"liba.so.1": ["/lib/liba.so.1"]}


@pytest.mark.parametrize("data", [b"", b"something else", b"glibc-ld.so.cache1.1\xff\xff"])
def test_loader_cache_of_another_format(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "ld.so.cache"
    path.write_bytes(data)
    assert read_cache(path) == {}


@pytest.mark.parametrize(
    ("mangled", "base"),
    [
        ("_ZNK3c106SymInt6sym_neERKS0_", "3c10::6SymInt::6sym_ne"),
        ("_ZNR5torch7Library4_defEON3c1014FunctionSchemaE", "5torch::7Library::4_def"),
        ("_ZN3c1013MessageLoggerC1EPKcii", "13MessageLogger"),
        ("_Z3addii", "3add"),
        ("cuInit", None),
    ],
)
def test_base_name(mangled: str, base: str | None) -> None:
    got = base_name(mangled)
    plain = None if base is None else "::".join(part.lstrip("0123456789") for part in base.split("::"))
    if mangled.startswith("_ZN3c1013"):
        plain = "c10::MessageLogger::MessageLogger"
    assert got == plain


def test_nearest_takes_the_most_similar_parameters() -> None:
    index = {"c10::f": ["_ZN3c101fEiPKcS1_jb", "_ZN3c101fEv"]}
    assert nearest("_ZN3c101fEiPKcS1_ib", index) == "_ZN3c101fEiPKcS1_jb"


def test_nearest_of_an_unknown_name() -> None:
    assert nearest("_ZN3c101gEv", {"c10::f": ["_ZN3c101fEv"]}) is None


def test_demangle_nothing() -> None:
    assert demangle([]) == {}
