"""The link verdict on made facts: what is proven, what is not known, and what is never read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from builder.abi.judge import Judge
from builder.abi.model import Extension, Facts, Known, Wheel
from builder.abi.verb import base_named, facts_of
from builder.facts import ProviderFact, load_facts
from builder.nativefacts import EXPORTED, NEEDED, UNDEFINED, ElfFacts, Undefined

Names = Mapping[str, str | None] | tuple[str, ...]


def facts(
    *wanted: str | Undefined,
    exports: Names = (),
    needed: tuple[str, ...] = (),
    **fields: Any,
) -> Facts:
    """The facts of a library: undefined names (or more exactly said), exported ones (with a version each, or none)."""
    undefined = tuple(Undefined(item, None, None, False) if isinstance(item, str) else item for item in wanted)
    by_version: dict[str | None, list[str]] = {}
    for name in exports:
        by_version.setdefault(exports[name] if isinstance(exports, Mapping) else None, []).append(name)
    exported = tuple((version, tuple(sorted(names))) for version, names in by_version.items())
    return facts_of(ElfFacts("x86_64", "dyn", needed=needed, undefined=undefined, exported=exported, **fields), "")


class Set:
    """Wheels, and which of their files were read."""

    def __init__(self) -> None:
        self.wheels: list[Wheel] = []
        self.read: list[str] = []
        self.said: dict[str, Any] = {}

    def wheel(self, name: str, files: Mapping[str, Facts], version: str = "1.0", promised: int | None = None) -> None:
        def read(file: str) -> Facts:
            self.read.append(file)
            return files[file]

        self.wheels.append(Wheel(name, version, tuple(files), read, promised))

    def torch(self, version: str = "2.10.0", **libraries: Facts) -> None:
        """A torch: `c10` is torch/lib/libc10.so."""
        found = {f"torch/lib/lib{name}.so": library for name, library in libraries.items()}
        self.wheel("torch", found, version)

    def judge(self, name: str = "kernel", base: str = "bookworm") -> list[Extension]:
        """The files of one wheel."""
        known: dict[str, Any] = {
            "base": base_named(base),
            "python": "3.11",
            "providers": load_facts(ProviderFact),
            "drivers": {"libcuda.so.1": "^cu[A-Z]"},
            "os_packages": {"libnuma.so.1": "libnuma1"},
            "cuda_sonames": {"libcudart.so": {"12": 12, "13": 13}, "libcurand.so": {"10": [12, 13]}},
            "owners": {"torch": ["^_ZN?K?(3c10|2at|5torch)", "^torch_"]},
        }
        (wheel,) = [wheel for wheel in self.wheels if wheel.name == name]
        return Judge(self.wheels, Known(**{**known, **self.said})).judge(wheel)

    def one(self, **named: str) -> Extension:
        """The only file of the wheel `kernel`."""
        (found,) = self.judge(**named)
        return found


@pytest.fixture
def made() -> Set:
    return Set()


CHECK = "_ZN3c104cuda5checkEiPKcb"
CHECK_NOW = "_ZN3c104cuda5checkEjPKcb"


# Names.


def test_a_name_that_torch_exports(made: Set) -> None:
    made.torch(c10=facts(exports=(CHECK,)))
    made.wheel("kernel", {"kernel/ops.so": facts(CHECK, needed=("libc10.so",))})
    found = made.one()
    assert (found.verdict, found.symbols, found.missing_symbols) == ("ok", 1, ())


def test_libraries_are_read_while_names_are_open_and_no_longer(made: Set) -> None:
    made.torch(torch_cuda=facts(), torch_cpu=facts(), c10=facts(exports=(CHECK,)))
    made.wheel("kernel", {"kernel/ops.so": facts(CHECK, needed=("libtorch_cuda.so", "libtorch_cpu.so", "libc10.so"))})
    assert made.one().verdict == "ok"
    assert set(made.read) == {"kernel/ops.so", "torch/lib/libc10.so"}


def test_a_name_that_torch_exports_no_longer(made: Set) -> None:
    made.torch(c10=facts(exports=(CHECK_NOW, "_ZN3c104cuda5otherEv")))
    made.wheel("kernel", {"kernel/ops.so": facts(CHECK, needed=("libc10.so",))})
    found = made.one()
    assert found.verdict == "broken"
    (missing,) = found.missing_symbols
    assert (missing.symbol, missing.nearest, missing.lacking) == (CHECK, CHECK_NOW, "torch 2.10.0")


def test_a_name_of_torch_is_not_looked_for_in_cudas_libraries(made: Set) -> None:
    made.torch(c10=facts(rpath=("$ORIGIN/../../nvidia/lib",), needed=("libcufft.so.11",)))
    made.wheel("nvidia-cufft-cu12", {"nvidia/lib/libcufft.so.11": facts(exports=(CHECK,))})
    made.wheel("kernel", {"kernel/ops.so": facts(CHECK, needed=("libc10.so",))})
    assert made.one().verdict == "broken"
    assert "nvidia/lib/libcufft.so.11" not in made.read


@pytest.mark.parametrize("directly", [True, False], ids=["it needs the library", "its package opens the library"])
def test_a_name_that_is_nobodys_is_looked_for_in_any_library_that_the_file_asks_for(made: Set, directly: bool) -> None:
    """CUTLASS's runtime lies in a wheel of NVIDIA's, and its names are none of CUDA's."""
    made.torch(c10=facts(rpath=("$ORIGIN/../../nvidia/lib",), needed=("libcublas.so.12",)))
    made.wheel("nvidia-cublas-cu12", {"nvidia/lib/libcublas.so.12": facts()})
    made.wheel("nvidia-dsl", {"nvidia_dsl/lib/librun.so": facts(exports=("_run",))})
    rpath = ("$ORIGIN/../nvidia_dsl/lib",) if directly else ()
    needed = ("libc10.so", "librun.so") if directly else ("libc10.so",)
    made.wheel("kernel", {"kernel/ops.so": facts("_run", needed=needed, rpath=rpath)})
    made.said["loaded_first"] = [
        {"distribution": "kernel", "files": ["kernel/*.so"], "libraries": ["nvidia_dsl/lib/librun.so"], "global": True}
    ] * (not directly)
    assert made.one().verdict == "ok"
    assert "nvidia/lib/libcublas.so.12" not in made.read


def test_the_old_string_counts_as_the_same_parameter(made: Set) -> None:
    old, new = "_ZN3c104failESs", "_ZN3c104failENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
    made.torch(c10=facts(exports=(new, "_ZN3c104failEPKc")))
    made.wheel("kernel", {"kernel/ops.so": facts(old, needed=("libc10.so",))})
    assert made.one().missing_symbols[0].nearest == new


def test_the_shim_s_names_are_torch_s(made: Set) -> None:
    made.torch(torch_cpu=facts(exports=("torch_new_string_handle",)))
    made.wheel("kernel", {"kernel/ops.so": facts("torch_exception_get_what", needed=("libtorch_cpu.so",))})
    assert made.one().verdict == "broken"


def test_names_that_need_nobody(made: Set) -> None:
    made.torch(c10=facts())
    weak = Undefined("__gmon_start__", None, None, True)
    made.wheel("kernel", {"kernel/ops.so": facts("PyModule_Create2", "_PyObject_New", weak, needed=("libc10.so",))})
    found = made.one()
    assert (found.verdict, found.symbols) == ("ok", 2)


def test_the_driver_s_names_are_the_driver_s(made: Set) -> None:
    made.wheel("kernel", {"kernel/ops.so": facts("cuLaunchKernelEx", needed=("libcuda.so.1",))})
    assert made.one().verdict == "ok"


def test_a_c_name_that_nobody_has_may_be_the_base_s(made: Set) -> None:
    made.torch(c10=facts())
    made.wheel("kernel", {"kernel/ops.so": facts("frobnicate", needed=("libc10.so",))})
    found = made.one()
    assert found.verdict == "uncertain"
    assert found.reasons == (
        "`frobnicate` is in no library of the set that it needs: whether the base has it is not known",
    )


def test_a_c_name_of_a_library_that_was_looked_into(made: Set) -> None:
    """Unversioned, found by way of torch: as deep_gemm_cpp of sgl-kernel 0.3.21 binds cuBLAS."""
    made.torch(torch_cuda=facts(needed=("libcublas.so.12",), rpath=("$ORIGIN/../../nvidia/lib",)))
    made.wheel(
        "nvidia-cublas-cu12", {"nvidia/lib/libcublas.so.12": facts(exports={"cublasCreate_v2": "libcublas.so.12"})}
    )
    made.wheel(
        "kernel",
        {
            "kernel/fine.so": facts("cublasCreate_v2", needed=("libtorch_cuda.so",)),
            "kernel/not.so": facts("cublasFrobnicate", needed=("libtorch_cuda.so",)),
        },
    )
    assert [item.verdict for item in made.judge()] == ["ok", "broken"]


def test_a_name_of_what_torch_opened_for_all(made: Set) -> None:
    made.torch(torch_global_deps=facts(needed=("libcublas.so.12",), runpath=("$ORIGIN/../../nvidia/lib",)))
    made.wheel("nvidia-cublas-cu12", {"nvidia/lib/libcublas.so.12": facts(exports=("cublasCreate_v2",))})
    made.wheel("kernel", {"kernel/ops.so": facts("cublasCreate_v2")})
    assert made.one().verdict == "ok"


def test_a_file_that_torch_loads_sees_what_torch_sees(made: Set) -> None:
    """As libtorch_nvshmem.so, which names none of the libraries that have its names."""
    made.torch(
        c10=facts(exports=(CHECK,)),
        torch_cuda=facts(needed=("libtorch_nvshmem.so", "libc10.so"), rpath=("$ORIGIN",)),
        torch_nvshmem=facts(CHECK),
        torch_other=facts(CHECK),
    )
    verdicts = {item.file: item.verdict for item in made.judge("torch")}
    assert (verdicts["torch/lib/libtorch_nvshmem.so"], verdicts["torch/lib/libtorch_other.so"]) == ("ok", "broken")


def test_a_standard_name_without_a_version_is_the_base_s(made: Set) -> None:
    name = "_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE10_M_disposeEv"
    made.said["base_exports"] = {"libstdc++.so.6": facts(exports={name: "GLIBCXX_3.4.21"}).exports}
    made.torch(c10=facts())
    made.wheel("kernel", {"kernel/ops.so": facts(name, needed=("libc10.so", "libstdc++.so.6"))})
    assert made.one().verdict == "ok"
    made.said["base_exports"] = {"libstdc++.so.6": facts(exports={name: "GLIBCXX_3.4.99"}).exports}
    assert made.one().verdict == "uncertain"


def test_names_that_could_not_be_read_prove_nothing(made: Set) -> None:
    made.torch(c10=facts(exports=(CHECK_NOW,), uncertain=(EXPORTED,)))
    made.wheel("kernel", {"kernel/ops.so": facts(CHECK, needed=("libc10.so",))})
    found = made.one()
    assert (found.verdict, found.missing_symbols) == ("uncertain", ())
    assert found.reasons == ("`torch/lib/libc10.so` of torch 2.10.0 could not be read to the end",)


def test_a_file_whose_own_names_could_not_be_read_is_never_ok(made: Set) -> None:
    made.torch(c10=facts())
    made.wheel(
        "kernel",
        {
            "kernel/half.so": facts(needed=("libc10.so",), uncertain=(UNDEFINED,)),
            "kernel/none.so": facts_of(None, "is not a sound ELF file: bad magic"),
        },
    )
    assert [(item.verdict, item.reasons) for item in made.judge()] == [
        ("uncertain", ("not all names that it needs could be read",)),
        ("uncertain", ("is not a sound ELF file: bad magic",)),
    ]


# Libraries.


def test_a_library_that_torch_loaded_is_found_without_a_path(made: Set) -> None:
    made.torch(torch_global_deps=facts(needed=("libcudart.so.12",), rpath=("$ORIGIN/../../nvidia/lib",)))
    made.wheel("nvidia-cuda-runtime-cu12", {"nvidia/lib/libcudart.so.12": facts(exports=("cudaMalloc",))})
    version = Undefined("cudaMalloc", "libcudart.so.12", "libcudart.so.12", False)
    made.wheel("kernel", {"kernel/ops.so": facts(version, needed=("libcudart.so.12",))})
    assert made.one().verdict == "ok"


def test_a_library_that_torch_opens_by_name(made: Set) -> None:
    made.torch(c10=facts())
    made.wheel("nvidia-cuda-nvrtc-cu12", {"nvidia/lib/libnvrtc.so.12": facts()})
    made.wheel("kernel", {"kernel/ops.so": facts(needed=("libnvrtc.so.12",))})
    assert made.one().verdict == "ok"


def test_a_library_that_torch_loaded_by_way_of_another_wheel_s(made: Set) -> None:
    made.torch(torch_cuda=facts(needed=("libcublas.so.12",), rpath=("$ORIGIN/../../nvidia/lib",)))
    made.wheel(
        "nvidia-cublas-cu12",
        {
            "nvidia/lib/libcublas.so.12": facts(needed=("libcublasLt.so.12",), rpath=("$ORIGIN",)),
            "nvidia/lib/libcublasLt.so.12": facts(),
        },
    )
    made.wheel("kernel", {"kernel/ops.so": facts(needed=("libcublasLt.so.12",))})
    assert made.one().verdict == "ok"


def test_nothing_is_followed_for_a_library_that_only_other_wheels_have(made: Set) -> None:
    made.torch(torch_cuda=facts(needed=("libcufft.so.11",), rpath=("$ORIGIN/../../nvidia/lib",)))
    made.wheel("nvidia-cufft-cu12", {"nvidia/lib/libcufft.so.11": facts()})
    made.wheel(
        "kernel",
        {
            "kernel/ops.so": facts(needed=("libz-1.so.1",), rpath=("$ORIGIN/../kernel.libs",)),
            "kernel.libs/libz-1.so.1": facts(),
        },
    )
    assert [item.verdict for item in made.judge()] == ["ok", "ok"]
    assert set(made.read) == {"kernel/ops.so", "kernel.libs/libz-1.so.1"}


def test_a_library_that_is_there_but_not_where_the_loader_looks(made: Set) -> None:
    made.torch(c10=facts())
    made.wheel("nvidia-curand-cu12", {"nvidia/lib/libcurand.so.10": facts()})
    made.wheel("kernel", {"kernel/ops.so": facts(needed=("libcurand.so.10",))})
    found = made.one()
    assert (found.verdict, found.missing_libraries) == ("uncertain", ())
    (reason,) = found.reasons
    assert reason == (
        "`nvidia/lib/libcurand.so.10` of nvidia-curand-cu12 1.0 is `libcurand.so.10`, and the loader does not look there: "
        "it is found if something opens it before"
    )


@pytest.mark.parametrize("path", ["rpath", "runpath"])
def test_a_library_by_the_file_s_own_path(made: Set, path: str) -> None:
    ops = facts(needed=("libcurand.so.10",), **{path: ("$ORIGIN/../nvidia/lib",)})
    made.wheel("nvidia-curand-cu12", {"nvidia/lib/libcurand.so.10": facts()})
    made.wheel("kernel", {"kernel/ops.so": ops})
    assert made.one().verdict == "ok"


def test_what_a_wheel_bundles_lies_beside(made: Set) -> None:
    made.wheel(
        "kernel",
        {
            "kernel.libs/libwebp-1.so.7": facts(needed=("libsharpyuv-1.so.0",)),
            "kernel.libs/libsharpyuv-1.so.0": facts(),
        },
    )
    assert [item.verdict for item in made.judge()] == ["ok", "ok"]


def test_a_library_of_another_cuda(made: Set) -> None:
    made.torch(torch_global_deps=facts(needed=("libcudart.so.13",), rpath=("$ORIGIN/../../nvidia/lib",)), c10=facts())
    made.wheel("nvidia-cuda-runtime", {"nvidia/lib/libcudart.so.13": facts()})
    version = Undefined("cudaMalloc", "libcudart.so.12", "libcudart.so.12", False)
    made.wheel("kernel", {"kernel/ops.so": facts(CHECK, version, needed=("libc10.so", "libcudart.so.12"))})
    found = made.one()
    assert (found.verdict, found.missing_libraries) == ("broken", ("libcudart.so.12",))
    assert found.because == ("`libcudart.so.12` is CUDA 12's, the set is CUDA 13",)
    assert [missing.symbol for missing in found.missing_symbols] == [CHECK], "cudaMalloc is the missing library's"


def test_a_name_that_may_be_in_the_missing_library_is_not_missing(made: Set) -> None:
    made.torch(c10=facts())
    made.wheel("kernel", {"kernel/ops.so": facts("_ZN5other4workEv", needed=("libc10.so", "libother.so"))})
    found = made.one()
    assert (found.verdict, found.missing_symbols, found.sought) == ("uncertain", (), ("libother.so",))


def test_nor_is_one_that_may_be_in_what_a_library_misses(made: Set) -> None:
    made.torch(c10=facts())
    files = {
        "kernel/libpart.so": facts(needed=("libheavy.so.3",)),
        "kernel/ops.so": facts("_ZN5other4workEv", CHECK, needed=("libpart.so", "libc10.so"), rpath=("$ORIGIN",)),
    }
    made.wheel("kernel", files)
    found = made.judge()[1]
    assert [missing.symbol for missing in found.missing_symbols] == [CHECK]
    assert found.reasons == (
        "`_ZN5other4workEv` may be in `libheavy.so.3`, which `libpart.so` needs and does not find",
    )


@pytest.mark.parametrize(
    ("library", "loaded_first"), [("libtorch_gone.so", ""), ("libtvm_ffi.so", "tvm_ffi/lib/libtvm_ffi.so")]
)
def test_a_library_that_only_wheels_have_and_the_whole_set_lacks(made: Set, library: str, loaded_first: str) -> None:
    made.torch(c10=facts())
    made.wheel("kernel", {"kernel/ops.so": facts(needed=(library,))})
    made.said["loaded_first"] = [{"distribution": "other", "files": [], "libraries": [loaded_first]}]
    assert (made.one().verdict, made.one().reasons) == ("uncertain", (f"`{library}` is in no wheel of the set",))
    made.said["whole"] = True
    assert (made.one().verdict, made.one().missing_libraries) == ("broken", (library,))


def test_any_other_may_be_the_system_s_even_without_a_number(made: Set) -> None:
    """AWS's SDK for C++ installs its libraries so."""
    made.said["whole"] = True
    made.wheel("kernel", {"kernel/ops.so": facts(needed=("libaws-cpp-sdk-s3.so",))})
    found = made.one()
    assert (found.verdict, found.missing_libraries) == ("uncertain", ("libaws-cpp-sdk-s3.so",))
    assert found.reasons == ("`libaws-cpp-sdk-s3.so` is in no wheel of the set: whether the base has it is not known",)


def test_with_a_number_it_may_be_the_base_s(made: Set) -> None:
    made.said["whole"] = True
    made.wheel("kernel", {"kernel/ops.so": facts(needed=("libheavy.so.3",))})
    found = made.one()
    assert (found.verdict, found.missing_libraries) == ("uncertain", ("libheavy.so.3",))
    assert found.reasons == ("`libheavy.so.3` is in no wheel of the set: whether the base has it is not known",)


def test_torch_s_libraries_without_a_torch(made: Set) -> None:
    made.wheel("kernel", {"kernel/ops.so": facts(CHECK, needed=("libc10.so",))})
    found = made.one()
    assert (found.verdict, found.missing_libraries, found.missing_symbols) == ("uncertain", (), ())
    assert found.reasons == ("`libc10.so` is torch's, and the set has no torch: none is named or required",)


def test_a_needed_library_that_was_only_recognised_proves_nothing(made: Set) -> None:
    made.torch(torch_global_deps=facts(needed=("libcudart.so.13",), rpath=("$ORIGIN/../../nvidia/lib",)))
    made.wheel("nvidia-cuda-runtime", {"nvidia/lib/libcudart.so.13": facts()})
    made.wheel("kernel", {"kernel/ops.so": facts(needed=("libcudart.so.12",), uncertain=(NEEDED,))})
    assert made.one().verdict == "uncertain"


def test_an_os_library_is_named_with_its_package(made: Set) -> None:
    made.wheel("kernel", {"kernel/ops.so": facts(needed=("libnuma.so.1", "libavutil.so.57", "libc.so.6"))})
    found = made.one()
    assert (found.verdict, found.packages) == ("ok", ("libnuma1", "libavutil57"))


# Versions.


@pytest.mark.parametrize(
    ("version", "base", "verdict"),
    [
        ("GLIBC_2.36", "bookworm", "ok"),
        ("GLIBC_2.36", "jammy", "broken"),
        ("GLIBCXX_3.4.31", "bookworm", "broken"),
        ("GLIBCXX_3.4.31", "noble", "ok"),
        ("CXXABI_1.3.13", "jammy", "ok"),
        ("CXXABI_1.3.15", "jammy", "broken"),
        ("GLIBC_PRIVATE", "bookworm", "ok"),
    ],
)
def test_the_base_s_versions(made: Set, version: str, base: str, verdict: str) -> None:
    library = "libc.so.6" if version.startswith("GLIBC_") else "libstdc++.so.6"
    wanted = Undefined("work", version, library, False)
    made.wheel("kernel", {"kernel/ops.so": facts(wanted, needed=(library,), verneed=((library, version),))})
    found = made.one(base=base)
    assert (found.verdict, found.missing_symbols) == (verdict, ())
    assert found.missing_versions == (() if verdict == "ok" else (version,))


def test_the_newest_version_is_named(made: Set) -> None:
    made.wheel("kernel", {"kernel/ops.so": facts(needed=("libc.so.6",), verneed=(("libc.so.6", "GLIBC_2.38"),))})
    assert made.one().because == ("`libc.so.6` of Debian 12 has GLIBC_2.36 at most",)


def test_a_version_that_a_wheel_s_library_does_not_define(made: Set) -> None:
    made.wheel("other", {"other/libx.so.1": facts(exports={"work": "X_1"}, verdef=("X_1",))})
    wanted = Undefined("work", "X_2", "libx.so.1", False)
    ops = facts(wanted, needed=("libx.so.1",), verneed=(("libx.so.1", "X_2"),), runpath=("$ORIGIN/../other",))
    made.wheel("kernel", {"kernel/ops.so": ops})
    found = made.one()
    assert (found.verdict, found.missing_versions) == ("broken", ("X_2",))
    assert found.because == ("`libx.so.1` of other 1.0 does not define X_2",)


# By design, and what is only worth knowing.


def entry(**fields: Any) -> dict[str, Any]:
    found = {"distribution": "kernel", "file": "kernel/*_cu12.so", "checks": ["needed"], "words": "libcudart.so.12"}
    return {**found, "consequence": "none; it takes the twin", **fields}


def twins(made: Set) -> None:
    made.torch(torch_global_deps=facts(needed=("libcudart.so.13",), rpath=("$ORIGIN/../../nvidia/lib",)))
    made.wheel("nvidia-cuda-runtime", {"nvidia/lib/libcudart.so.13": facts()})
    files = {f"kernel/ops_cu{major}.so": facts(needed=(f"libcudart.so.{major}",)) for major in (12, 13)}
    made.wheel("kernel", files)


def test_of_twins_one_cannot_load_by_design(made: Set) -> None:
    twins(made)
    made.said["exceptions"] = [entry(when={"cuda": 13})]
    assert [(item.verdict, item.by_design) for item in made.judge()] == [("ok", "none; it takes the twin"), ("ok", "")]


@pytest.mark.parametrize(
    "change", [{"when": {"cuda": 12}}, {"words": "libother"}, {"checks": ["load"]}, {"file": "x/*"}]
)
def test_an_entry_excuses_what_it_names_and_nothing_else(made: Set, change: dict[str, Any]) -> None:
    twins(made)
    made.said["exceptions"] = [entry(**change)]
    assert [item.verdict for item in made.judge()] == ["broken", "ok"]


def test_an_entry_excuses_what_an_os_package_may_bring_too(made: Set) -> None:
    made.wheel("kernel", {"kernel/heic.so": facts("heif_init", needed=("libheif.so.1",)), "kernel/ops.so": facts()})
    assert {item.verdict for item in made.judge()} == {"uncertain", "ok"}
    made.said["exceptions"] = [entry(file="kernel/heic.so", words="libheif.so.1", consequence="no HEIC")]
    assert [(item.verdict, item.by_design) for item in made.judge()] == [("ok", "no HEIC"), ("ok", "")]


def bitsandbytes(made: Set, version: str, runtime: str, *numbers: str) -> dict[str, Extension]:
    """bitsandbytes with files for these CUDAs and the CPU's, beside a torch of a CUDA; the verdicts by file name."""
    major = runtime.partition(".")[0]
    made.said["cuda_sonames"] = {"libcudart.so": {"12": 12, "13": 13}}
    made.torch(torch_global_deps=facts(needed=(f"libcudart.so.{major}",), rpath=("$ORIGIN/../../nvidia/lib",)))
    made.wheel("nvidia-cuda-runtime", {f"nvidia/lib/libcudart.so.{major}": facts()}, runtime)
    files = {
        f"bitsandbytes/libbitsandbytes_cuda{number}.so": facts(needed=(f"libcudart.so.{number[:2]}",))
        for number in numbers
    }
    files |= {"bitsandbytes/libbitsandbytes_cpu.so": facts()}
    files |= {"bitsandbytes/libbitsandbytes_xpu.so": facts(needed=("libsycl.so.8",))}
    made.wheel("bitsandbytes", files, version)
    found = made.judge("bitsandbytes")
    return {item.file.removeprefix("bitsandbytes/libbitsandbytes_").removesuffix(".so"): item for item in found}


@pytest.mark.parametrize(("runtime", "opened", "aside"), [("13.0.96", "130", "128"), ("12.8.90", "128", "130")])
def test_of_a_file_for_each_cuda_that_of_torch_s_is_enough(made: Set, runtime: str, opened: str, aside: str) -> None:
    found = bitsandbytes(made, "0.48.0", runtime, "118", "128", "130")
    assert {item.verdict for item in found.values()} == {"ok"}
    assert (found[f"cuda{opened}"].by_design, found["cpu"].by_design) == ("", "")
    release = ".".join(runtime.split(".")[:2])
    for number in (aside, "118"):
        assert found[f"cuda{number}"].by_design == (
            f"none; bitsandbytes opens `bitsandbytes/libbitsandbytes_cuda{opened}.so` alone, by torch's CUDA {release}"
        )
    assert found["xpu"].by_design


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("torch-c-dlpack-ext", "torch_c_dlpack_ext/libtorch_c_dlpack_addon_torch{}-cuda.so"),
        ("nixl-cu13", "nixl_ep_cu13/nixl_ep_cpp_torch{}.cpython-311-x86_64-linux-gnu.so"),
    ],
)
@pytest.mark.parametrize(("torch", "broken"), [("2.10.0", "29"), ("2.9.1", "210"), ("2.15.0", "")])
def test_of_a_file_for_each_torch_that_of_the_set_is_enough(
    made: Set, name: str, file: str, torch: str, broken: str
) -> None:
    """The file for another torch lacks a name; where there is none for the set's torch, the package does without."""
    made.torch(torch, c10=facts(exports=(CHECK_NOW,)))
    wants = {
        number: facts(CHECK if broken in ("", number) else CHECK_NOW, needed=("libc10.so",)) for number in ("29", "210")
    }
    made.wheel(name, {file.format(number): each for number, each in wants.items()}, "1.5.1")
    found = {item.file: item for item in made.judge(name)}
    assert {item.verdict for item in found.values()} == {"ok"}
    by_design = {each: found[file.format(each)].by_design for each in wants}
    if broken:
        opened = file.format("210" if broken == "29" else "29")
        assert by_design.pop(broken) == f"none; {name} opens `{opened}` alone, by torch {torch.rpartition('.')[0]}"
        assert list(by_design.values()) == [""]
    else:
        assert all(text.startswith(f"none; {name} has no file for torch 2.15: ") for text in by_design.values())


def test_the_file_of_the_set_s_torch_has_to_load(made: Set) -> None:
    made.torch("2.9.1", c10=facts(exports=(CHECK_NOW,)))
    file = "torch_c_dlpack_ext/libtorch_c_dlpack_addon_torch29-cuda.so"
    made.wheel("torch-c-dlpack-ext", {file: facts(CHECK, needed=("libc10.so",))}, "0.1.5")
    assert [item.verdict for item in made.judge("torch-c-dlpack-ext")] == ["broken"]


def test_where_that_of_torch_s_cuda_does_not_load_no_other_stands_in(made: Set) -> None:
    made.said["whole"] = True
    found = bitsandbytes(made, "0.48.0", "12.8.90", "118", "126", "128")
    assert found["cuda128"].verdict == "ok"
    made.wheels.pop()
    files = {"bitsandbytes/libbitsandbytes_cuda128.so": facts(needed=("libtorch_gone.so",))}
    files |= {"bitsandbytes/libbitsandbytes_cuda126.so": facts(needed=("libcudart.so.12",))}
    made.wheel("bitsandbytes", files, "0.48.0")
    assert [item.verdict for item in made.judge("bitsandbytes")] == ["ok", "broken"]


@pytest.mark.parametrize("version", ["0.45.5", "0.48.0"])
def test_a_cuda_for_which_there_is_no_file(made: Set, version: str) -> None:
    found = bitsandbytes(made, version, "13.0.96", "118", "128")
    assert {name for name, item in found.items() if item.verdict == "broken"} == {"cuda130"}
    assert found["cuda130"].missing_libraries == ("libbitsandbytes_cuda130.so",)
    assert (
        found["cuda130"]
        .because[0]
        .startswith(f"bitsandbytes {version} has no file for torch's CUDA 13.0, but for 118, 128: it ")
    )


@pytest.mark.parametrize(
    ("runtime", "numbers", "opened"),
    [("12.9.79", ("126", "128", "130"), "128"), ("12.0.1", ("118", "121", "124"), "121"), ("13.0.1", ("128",), "130")],
)
def test_from_0_50_on_it_takes_the_nearest_of_the_major(
    made: Set, runtime: str, numbers: tuple[str, ...], opened: str
) -> None:
    found = bitsandbytes(made, "0.50.2", runtime, *numbers)
    assert found[f"cuda{opened}"].verdict == ("ok" if opened in numbers else "broken")
    assert f"_cuda{opened}.so` alone" in found["xpu"].by_design


def test_a_package_that_loses_all_of_its_code_is_not_excused(made: Set) -> None:
    """torchao 0.9.0: it notices, and goes on without."""
    made.torch(c10=facts())
    made.wheel("kernel", {"kernel/_C.so": facts(CHECK, needed=("libc10.so",))})
    made.said["exceptions"] = [
        entry(file="kernel/_C.so", checks=["symbols"], words=CHECK, consequence="it goes on without its operators")
    ]
    found = made.one()
    assert (found.verdict, found.because) == ("broken", ("known: it goes on without its operators",))


def test_a_file_that_another_wheel_brings_too(made: Set) -> None:
    made.torch(c10=facts())
    made.wheel("kernel", {"kernel/ops.so": facts(CHECK, needed=("libc10.so",))})
    made.wheel("kernel-two", {"kernel/ops.so": facts(needed=("libc10.so",))})
    (one,), (two,) = made.judge("kernel"), made.judge("kernel-two")
    assert (one.verdict, two.verdict) == ("uncertain", "uncertain")
    both = "kernel 1.0 and kernel-two 1.0 both bring `kernel/ops.so`: the one that is installed last stays"
    assert one.reasons == two.reasons == (both,)
    assert [missing.symbol for missing in one.missing_symbols] == [CHECK]


def test_files_that_are_shared_on_purpose(made: Set) -> None:
    made.said["shared_files"] = [{"files": ["kernel/*"]}]
    for name in ("kernel", "kernel-two"):
        made.wheel(name, {"kernel/ops.so": facts()})
    assert made.one().verdict == "ok"


def test_built_for_one_cpython(made: Set) -> None:
    made.wheel("kernel", {"kernel/ops.cpython-310-x86_64-linux-gnu.so": facts()})
    assert made.one().notes == ("is built for CPython 3.10: Python 3.11 does not find it by name",)


def for_machine(machine: str) -> Facts:
    return facts_of(ElfFacts(machine, "dyn", undefined=(Undefined("frobnicate", None, None, False),)), "")


def test_a_file_for_another_machine_beside_those_for_this_one(made: Set) -> None:
    """CUTLASS brings its runtime for aarch64, to link against."""
    made.wheel("kernel", {"kernel/ops.so": facts(), "kernel/stubs/aarch64/libops.so": for_machine("aarch64")})
    found = {item.file: (item.verdict, item.by_design) for item in made.judge()}
    assert found == {
        "kernel/ops.so": ("ok", ""),
        "kernel/stubs/aarch64/libops.so": ("ok", "none; it is for another machine than x86_64"),
    }


@pytest.mark.parametrize(
    "name", ["kernel/libops.so", "kernel/ops.abi3.so", "kernel/ops.cpython-311-x86_64-linux-gnu.so"]
)
def test_a_file_for_another_machine_that_python_imports_or_that_is_alone(made: Set, name: str) -> None:
    beside = {} if name == "kernel/libops.so" else {"kernel/other.so": facts()}
    made.wheel("kernel", {name: for_machine("aarch64"), **beside})
    (found,) = [item for item in made.judge() if item.file == name]
    assert (found.verdict, found.because) == ("broken", ("it is for aarch64, and the target is x86_64",))


def test_a_tag_that_promises_too_much(made: Set) -> None:
    ops = facts(needed=("libc.so.6",), verneed=(("libc.so.6", "GLIBC_2.2.5"), ("libc.so.6", "GLIBC_2.27")))
    made.wheel("kernel", {"kernel/ops.so": ops}, promised=17)
    assert made.one().notes == ("needs GLIBC_2.27, and the wheel's tag promises glibc 2.17 to do",)


@pytest.mark.parametrize("is_global", [True, False])
def test_what_its_package_opens_before(made: Set, is_global: bool) -> None:
    made.torch(c10=facts())
    made.wheel("other", {"other/libffi.so": facts(exports=("_ZN5other4workEv",))})
    made.wheel("kernel", {"kernel/ops.so": facts("_ZN5other4workEv")})
    made.said["loaded_first"] = [
        {"distribution": "kernel", "files": ["kernel/*"], "libraries": ["other/libffi.so"], "global": is_global}
    ]
    assert made.one().verdict == ("ok" if is_global else "broken")
