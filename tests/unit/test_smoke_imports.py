"""`imports`, `imports-faked` and `gated-imports` on a made-up torch and sglang."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.smoke.faked import Faked, check_gated_imports, check_imports_faked
from builder.smoke.gates import Words, find, words_of
from builder.smoke.imports import check_imports
from builder.smoke.report import Check, Result
from tests.unit.smoke_made import Site, finished, said

# Processes and servers of their own: `make processes`.
pytestmark = pytest.mark.processes

TORCH = {
    "torch/__init__.py": "from . import cuda, version\n__version__ = '2.11.0'\n",
    "torch/version.py": "cuda = '13.0'\n",
    "torch/cuda.py": "def is_available():\n    return False\ndef device_count():\n    return 0\n",
}
GATED = {
    "model": r"(^|_)(sm[0-9]+\w*|is_sm\w+)$",
    "cuda": r"(^|_)(is_cuda|is_flashinfer_available)$|^torch\.cuda\.is_available$",
    "other": r"(^|_|\.)(hip|npu|xpu|cpu|musa)(_|$)",
}
WORDS = words_of(GATED)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path)
    made.wheel("torch", "2.11.0", TORCH, layer="torch")
    made.spec_data["facts"] |= {
        "gated": GATED,
        "warm_imports": ["torch"],
        "registries": [],
        "swallowed_imports": [r"Ignore import error when loading ([\w.]+): (.*)$"],
    }
    return made


def sglang(site: Site, files: dict[str, str], *imports: str) -> None:
    site.wheel("sglang", "0.5.15", {"sglang/__init__.py": "", **files}, layer="sglang")
    site.spec_data["imports"] = list(imports)


def plain(site: Site) -> tuple[Check, str]:
    with site.native(site.spec.names(sglang=True)) as (native, ledger):
        result = check_imports(native, ledger)
    return finished(result), said(result, "imports")


def faked(site: Site) -> tuple[Check, str]:
    with site.native(site.spec.names(sglang=True)) as (native, ledger):
        result = check_imports_faked(Faked(native), ledger)
    return finished(result), said(result, "imports-faked")


def test_modules_that_import(site: Site) -> None:
    sglang(site, {"sglang/a.py": "", "sglang/b.py": ""}, "sglang.a", "sglang.b")
    check, text = plain(site)
    assert (text, check.looked_at, check.expected, check.detail) == ("", 2, 2, "sglang.a, sglang.b")


def test_module_that_raises(site: Site) -> None:
    body = "def f():\n    raise ValueError('Either a revision or a version must be specified')\nf()\n"
    sglang(site, {"sglang/a.py": body, "sglang/b.py": ""}, "sglang.a", "sglang.b")
    lines = plain(site)[1].splitlines()
    assert lines[0] == (
        "error: `import sglang.a` fails: ValueError: Either a revision or a version must be specified [imports]"
    )
    assert lines[-2:] == [
        '      File "sglang/a.py", line 2, in f',
        "        raise ValueError('Either a revision or a version must be specified')",
    ]


def test_module_that_needs_what_no_wheel_brings(site: Site) -> None:
    sglang(site, {"sglang/a.py": "import not_there\n"}, "sglang.a")
    assert plain(site)[1].splitlines()[-1] == (
        "  hint: no wheel of the lock brings `not_there`, or the file was removed: see `record`"
    )


def test_module_that_another_distribution_refuses(site: Site) -> None:
    site.wheel("kernels", "0.17.0", {"kernels/layer.py": "raise ValueError('Either a revision or a version')\n"})
    sglang(site, {"sglang/a.py": "import kernels.layer\n"}, "sglang.a")
    assert plain(site)[1].splitlines()[-1] == (
        "  hint: `kernels/layer.py` of kernels 0.17.0 raised it, called from `sglang/a.py` of sglang 0.5.15: these versions do "
        "not go together"
    )


def test_modules_that_fail_alike_are_one_finding(site: Site) -> None:
    files = {"sglang/bad.py": "raise ValueError('no')\n", **{f"sglang/{m}.py": "import sglang.bad\n" for m in "abc"}}
    sglang(site, files, "sglang.a", "sglang.b", "sglang.c")
    check, text = plain(site)
    assert (check.looked_at, len(check.findings)) == (3, 1)
    assert text.splitlines()[0] == (
        "error: `import sglang.a` fails: ValueError: no, and so do `sglang.b`, `sglang.c` [imports]"
    )


def test_module_that_ends_the_process(site: Site) -> None:
    files = {"sglang/a.py": "import os\nprint('oh no')\nos.abort()\n", "sglang/b.py": "raise SystemExit(0)\n"}
    sglang(site, files, "sglang.a", "sglang.b")
    check, text = plain(site)
    assert check.looked_at == 2
    assert "error: `import sglang.a` fails: the process that imports it was ended by SIGABRT [imports]" in text
    assert "error: `import sglang.b` fails: SystemExit: 0 [imports]" in text


def test_modules_do_not_see_each_other(site: Site) -> None:
    files = {"sglang/a.py": "import sys\nsys.modules['gone'] = sys\n", "sglang/b.py": "import gone\n"}
    sglang(site, files, "sglang.a", "sglang.b")
    assert "`import sglang.b` fails: ModuleNotFoundError: No module named 'gone'" in plain(site)[1]


def test_working_folder_shadows_nothing(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('the wrong torch')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sglang(site, {"sglang/a.py": "import torch\n"}, "sglang.a")
    assert plain(site)[1] == ""


def test_gpu_is_faked_with_the_target_s_capability(site: Site) -> None:
    body = (
        "import torch\n"
        "assert torch.cuda.is_available() and torch.cuda.device_count() == 1\n"
        "assert torch.cuda.get_device_capability() == (12, 0), torch.cuda.get_device_capability()\n"
        "assert torch.cuda.get_device_properties(0).major == 12\n"
    )
    sglang(site, {"sglang/a.py": body}, "sglang.a")
    check, text = faked(site)
    assert (text, check.detail) == ("", "1 module as on 12.0")
    assert "AssertionError" in plain(site)[1]


def test_module_that_fails_on_one_target_only(site: Site) -> None:
    site.spec_data["gpus"].append({"capability": "9.0", "nvcc": "90a", "flashinfer": "9.0a"})
    sglang(site, {"sglang/a.py": "import torch\nassert torch.cuda.get_device_capability() == (9, 0)\n"}, "sglang.a")
    check, text = faked(site)
    assert (check.looked_at, check.expected) == (2, 2)
    assert text.splitlines()[0] == "error: `import sglang.a` as on GPU 12.0 fails: AssertionError [imports-faked]"
    assert "9.0" not in text


REGISTRY = (
    "import logging\nlogging.getLogger('x').warning('Ignore import error when loading sglang.models.k: no module')\n"
)


def test_model_whose_import_error_is_swallowed(site: Site) -> None:
    site.spec_data["facts"]["registries"] = ["sglang.registry"]
    sglang(site, {"sglang/registry.py": REGISTRY, "sglang/models/k.py": ""}, "sglang")
    assert faked(site)[1] == (
        "error: sglang leaves out `sglang.models.k` as on GPU 12.0: no module [imports-faked]\n"
        "  because: sglang swallows a model's import error and goes on without the model\n"
        "  hint: a server would say that the architecture is not supported"
    )


def test_exception_excuses_a_swallowed_model(site: Site) -> None:
    site.spec_data["facts"]["registries"] = ["sglang.registry"]
    sglang(site, {"sglang/registry.py": REGISTRY, "sglang/models/k.py": ""}, "sglang")
    site.exception(distribution="sglang", file="sglang/models/k.py", checks=["imports-faked"], words="no module")
    check, text = faked(site)
    assert (text, check.exceptions) == ("", ("known",))


def test_stack_without_sglang(site: Site) -> None:
    check, _ = plain(site)
    assert (check.ok, check.detail) == (True, "not applicable: the spec names no module to import")


def gates(source: str, words: Words = WORDS) -> list[str]:
    return [
        f"{item.line} {item}{' guarded' if item.guarded else ''}" for item in find(source, "sglang/srt/x.py", words)
    ]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import a\n", []),
        ("if is_cuda():\n    import a\n", ["2 import a"]),
        ("if _is_cuda:\n    from a import b, c\n", ["2 from a import b", "2 from a import c"]),
        ("if current_platform.is_cuda():\n    from a import *\n", ["2 import a"]),
        ("if torch.cuda.is_available():\n    import a\n", ["2 import a"]),
        ("if _is_hip:\n    import a\nelse:\n    import b\n", ["4 import b"]),
        ("if _is_hip:\n    import a\nelif _is_cuda:\n    import b\nelse:\n    import c\n", ["4 import b"]),
        ("if not _is_cuda:\n    import a\nelse:\n    import b\n", ["4 import b"]),
        ("if _is_cuda or _is_hip:\n    import a\n", ["2 import a"]),
        ("if _is_cuda and _is_npu:\n    import a\n", []),
        ("if _is_cuda and is_sm90_supported():\n    import a\nelse:\n    import b\n", ["2 import a", "4 import b"]),
        ("if not (_is_npu or _is_hip) and _is_cuda:\n    import a\n", ["2 import a"]),
        ("if _is_cuda and unknown:\n    import a\n", ["2 import a"]),
        ("if unknown:\n    import a\n", []),
        ("if TYPE_CHECKING:\n    if is_cuda():\n        import a\n", []),
        ("_use = is_cuda() and not _is_hip\nif _use:\n    import a\n", ["3 import a"]),
        ("_use_aiter = flag and _is_hip\nif _use_aiter:\n    import a\n", []),
        ("def f():\n    if is_cuda():\n        import a\n", []),
        (
            "if is_cuda():\n    try:\n        import a\n    except ImportError:\n        import b\n",
            ["3 import a guarded"],
        ),
        ("if is_cuda():\n    try:\n        import a\n    finally:\n        import b\n", ["3 import a", "5 import b"]),
        ("if is_cuda():\n    with warnings():\n        import a\n", ["3 import a"]),
        (
            "if is_cuda():\n    from . import a\n    from ..y import b\n",
            ["2 from sglang.srt import a", "3 from sglang.y import b"],
        ),
    ],
)
def test_gate(source: str, found: list[str]) -> None:
    assert gates(source) == found


def gated(site: Site) -> tuple[Check, str]:
    with site.native(site.spec.names(sglang=True)) as (native, ledger):
        result: Result = check_gated_imports(Faked(native), ledger)
    return finished(result), said(result, "gated-imports")


GATE = "from sglang.common import is_cuda\nif is_cuda():\n    from sgl_kernel import {}\n"
COMMON = "import torch\ndef is_cuda():\n    return torch.cuda.is_available()\n"


def gated_site(site: Site, name: str, kernel: str = "good = 1\n", **more: str) -> None:
    site.wheel("sglang-kernel", "0.4.4", {"sgl_kernel/__init__.py": kernel}, layer="kernels")
    files = {"sglang/common.py": COMMON, "sglang/x.py": GATE.format(name)}
    sglang(site, {**files, **{f"sglang/{k}.py": v for k, v in more.items()}})


def test_gated_imports_that_resolve(site: Site) -> None:
    gated_site(site, "good, sub", kernel="good = 1\n")
    (site.packages / "sgl_kernel/sub.py").write_text("")
    check, text = gated(site)
    assert (text, check.looked_at, check.detail) == ("", 2, "in 1 file (of 3 parsed), resolved as on 12.0")


def test_gated_import_of_a_name_that_is_not_there(site: Site) -> None:
    gated_site(site, "good, gone")
    check, text = gated(site)
    assert (check.looked_at, text) == (
        2,
        (
            "error: `from sgl_kernel import gone` at sglang/x.py:3 fails as on GPU 12.0: ImportError: cannot import name 'gone' "
            "from 'sgl_kernel' [gated-imports]"
        ),
    )


def test_gated_import_of_a_module_that_raises(site: Site) -> None:
    gated_site(site, "good", kernel="raise ImportError('libcuda.so.1: cannot open')\n")
    lines = gated(site)[1].splitlines()
    assert lines[0] == (
        "error: `from sgl_kernel import good` at sglang/x.py:3 fails as on GPU 12.0: ImportError: libcuda.so.1: cannot open "
        "[gated-imports]"
    )


def test_gated_import_that_ends_the_process_does_not_hide_the_others(site: Site) -> None:
    gated_site(site, "good", kernel="import os\nos.abort()\n", y=GATE.replace("sgl_kernel", "zlib").format("gone"))
    check, text = gated(site)
    assert check.looked_at == 2
    assert (
        "`from sgl_kernel import good` at sglang/x.py:3 fails as on GPU 12.0: the process that imports it was ended by SIGABRT"
        in text
    )
    assert "`from zlib import gone` at sglang/y.py:3 fails as on GPU 12.0: ImportError" in text


def test_gated_import_that_only_fails_after_another(site: Site) -> None:
    kernel = "import sys\nassert 'sglang.first' not in sys.modules\ngood = 1\n"
    first = "from sglang.common import is_cuda\nif is_cuda():\n    from asyncio import sleep\n    from sglang.first import common\n"
    gated_site(site, "good", kernel=kernel, first="from sglang import common\n", y=first)
    # Pairs are resolved in order of their names: `sglang.first` has to come before what it disturbs.
    (site.packages / "sglang/x.py").write_text(GATE.replace("sgl_kernel", "zz_kernel").format("good"))
    site.wheel("zz", files={"zz_kernel/__init__.py": kernel})
    check, text = gated(site)
    assert (check.ok, text) == (
        True,
        (
            "note: `import zz_kernel` as on GPU 12.0 fails after other imports, and works alone [gated-imports]\n"
            "  because: what it finds depends on what was imported before"
        ),
    )


def test_optional_gated_import_of_what_is_not_in_the_lock(site: Site) -> None:
    optional = "from sglang.common import is_cuda\nif is_cuda():\n    try:\n        import deep_ep\n    except ImportError:\n        pass\n"
    gated_site(site, "good", y=optional)
    check, text = gated(site)
    assert (check.ok, check.findings[0].severity) == (True, "note")
    assert text.splitlines()[-1] == "  hint: deep_ep is not in the lock, and the import is optional"


def test_exception_excuses_a_gated_import(site: Site) -> None:
    gated_site(site, "gone")
    site.exception(
        distribution="sglang", file="sglang/x.py", checks=["gated-imports"], words="cannot import name 'gone'"
    )
    check, text = gated(site)
    assert (text, check.exceptions) == ("", ("known",))


def test_file_with_a_byte_order_mark(site: Site) -> None:
    gated_site(site, "good", y="\ufeffimport os\n")
    assert gated(site)[1] == ""


def test_file_that_does_not_parse(site: Site) -> None:
    gated_site(site, "good", y="if:\n")
    assert gated(site)[1] == "error: `sglang/y.py` cannot be parsed: invalid syntax (<unknown>, line 1) [gated-imports]"


def test_files_that_the_facts_leave_out(site: Site) -> None:
    site.spec_data["facts"]["gated"] = {**GATED, "leave_out": ["sglang/x.py"]}
    gated_site(site, "gone")
    assert gated(site)[0].detail == ("not applicable: 2 files of the sglang layer have no import behind a CUDA gate")
