"""`Key: value` lines: check_env, torch's, vLLM's and flashinfer's collect_env, hand-made lists and tables.

What a key means is data: `KEYS`. A key that is none of these is a package, if it is one that reports are known to name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from builder.reports import forms
from builder.reports.lines import Line
from builder.reports.model import Fact

Form = Callable[[str], str | None]

ABSENT = re.compile(r"\s*(?:module not found|not installed|not found|package not installed)\s*\.?\s*$", re.IGNORECASE)
UNKNOWN = re.compile(
    r"\s*(?:could not collect|n/?a|none|no cuda|not available|not applicable|unknown|<unset>|<probe failed>.*|<import failed.*|<nvidia-smi unavailable>|err!|\[n/a\]|-+)?\s*$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class _Key:
    """What a key says: the name of the fact, the form of its value, and the kind of report that has it."""

    fact: str
    form: Form
    source: str


_TABLE = "table"
KEYS: dict[str, _Key] = {}


def _add(source: str, fact: str, form: Form, *keys: str) -> None:
    for key in keys:
        KEYS[key] = _Key(fact, form, source)


_add("check_env", "python", forms.python, "python")
_add("collect_env", "python", forms.python, "python version")
_add(
    _TABLE, "package.torch", forms.version, "pytorch", "torch", "torch.__version__", "torch.__version", "torch version"
)
_add("collect_env", "package.torch", forms.version, "pytorch version")
_add("check_env", "cuda_available", forms.boolean, "cuda available")
_add("collect_env", "cuda_available", forms.boolean, "is cuda available", "torch.cuda.is_available()")
_add("collect_env", "torch_cuda", forms.cuda, "cuda used to build pytorch", "torch.version.cuda", "torch cuda")
_add("check_env", "nvcc", forms.cuda, "nvcc", "nvcc version", "nvcc on path")
_add("collect_env", "nvcc", forms.cuda, "cuda runtime version", "cuda toolkit resolved by flashinfer jit")
_add("check_env", "driver", forms.driver, "cuda driver version", "cuda driver versions")
_add(
    "collect_env",
    "driver",
    forms.driver,
    "nvidia driver version",
    "driver version",
    "nvidia driver",
    "driver",
    "gpu driver",
)
_add(_TABLE, "cuda", forms.cuda, "cuda", "cuda version", "cuda toolkit")
_add("collect_env", "os", forms.operating_system, "os", "operating system", "os version", "system", "distro")
_add("collect_env", "libc", forms.libc, "libc version", "libc", "glibc", "glibc version")
_add("collect_env", "cudnn", forms.cudnn, "cudnn version", "torch.backends.cudnn.version()")
_add(
    "collect_env",
    "arch",
    forms.machine,
    "architecture",
    "arch",
    "python platform",
    "platform",
    "machine",
    "uname",
    "uname -a",
    "uname -m",
)
_add("collect_env", "image", forms.image, "docker image", "image", "container image")
_add(
    "collect_env",
    "gpu",
    forms.gpu,
    "gpu models and configuration",
    "gpu",
    "gpus",
    "gpu name",
    "gpu model",
    "device",
    "hardware",
    "device name",
)
_add("collect_env", "capability.0", forms.capability, "compute capability", "cuda capability", "sm version", "sm")
_add("collect_env", "package.vllm", forms.version, "vllm version")
_add("builder", "matrix", lambda text: _full(r"[a-z0-9][a-z0-9._-]{0,62}", text), "sglang-stack matrix")
_add("builder", "lock", lambda text: _full(r"[0-9a-f]{64}", text), "sglang-stack lock")
_add("collect_env", "jit_archs", lambda text: _archs(text), "target cuda archs (resolved)")
_add("collect_env", "torch_archs", lambda text: _archs(text), "torch compiled archs", "torch.cuda.get_arch_list()")

# What people call packages where a package's name is expected to stand.
_PACKAGES = {
    "flashinfer": "flashinfer-python",
    "flashinfer-python": "flashinfer-python",
    "sgl-kernel": "sgl-kernel",
    "pytorch-triton": "triton",
    "zmq": "pyzmq",
    "pil": "pillow",
    "multipart": "python-multipart",
}

# check_env's own list in its ages, and what tables name: a key alone says little, so unknown ones are left alone.
KNOWN_PACKAGES = frozenset(
    [
        "sglang",
        "sgl-kernel",
        "sglang-kernel",
        "flashinfer",
        "flashinfer-python",
        "flashinfer-cubin",
        "flashinfer-jit-cache",
        "triton",
        "transformers",
        "torchao",
        "torchvision",
        "torchaudio",
        "numpy",
        "aiohttp",
        "fastapi",
        "hf-transfer",
        "huggingface-hub",
        "interegular",
        "modelscope",
        "orjson",
        "outlines",
        "packaging",
        "psutil",
        "pydantic",
        "python-multipart",
        "multipart",
        "pyzmq",
        "zmq",
        "torchcodec",
        "uvicorn",
        "uvloop",
        "vllm",
        "xgrammar",
        "openai",
        "tiktoken",
        "anthropic",
        "litellm",
        "decord",
        "decord2",
        "requests",
        "tqdm",
        "pillow",
        "pil",
        "kernels",
        "flash-attn",
        "flash-attn-4",
        "nvidia-nccl-cu12",
        "nvidia-nccl-cu13",
        "nvidia-cudnn-cu12",
        "nvidia-cudnn-cu13",
        "nvidia-cutlass-dsl",
        "quack-kernels",
        "tilelang",
        "apache-tvm-ffi",
        "deep-gemm",
        "sgl-deep-gemm",
        "deep-ep",
        "mooncake-transfer-engine",
        "compressed-tensors",
        "llguidance",
        "soundfile",
        "accelerate",
        "peft",
        "cuda-python",
        "cuda-bindings",
        "xformers",
        "bitsandbytes",
        "torch-memory-saver",
        "nixl",
        "sglang-router",
    ]
)

_GPU_LINE = re.compile(
    r"^\s*[-*]?\s*GPU\s?(\d{1,3}(?:\s?,\s?\d{1,3}){0,63})\s*(?:\((?:CUDA|nvidia-smi) order\))?\s*:\s*(.+)$",
    re.IGNORECASE,
)
_GPU_CAPABILITY = re.compile(
    r"^\s*[-*]?\s*GPU\s?(\d{1,3}(?:\s?,\s?\d{1,3}){0,63})\s+Compute Capability\s*:\s*(.+)$", re.IGNORECASE
)
_COUNTED = re.compile(r"^\s*(\d{1,3})\s?(?:x|×|\*)\s?(.+)$|^(.+?)\s?(?:x|×|\*)\s?(\d{1,3})\b", re.IGNORECASE)
_UNAME = re.compile(
    r"^\s*(?:uname -a:?\s{1,8})?Linux \S{1,80} \d{1,2}\.\d{1,3}\S{0,80}\s.*\b(x86_64|aarch64)\b|^\s*(x86_64|aarch64)$"
)
_COUNTED_ALONE = re.compile(r"(\d{1,3})\s?(?:x|×)\s?(\S.{2,80})$", re.IGNORECASE)
_ARCH = re.compile(r"\(\s*\d{1,2}\s*,\s*'?\d[af]?'?\s*\)|(?:sm|compute)_\d{2,3}[af]?")
_TITLE = re.compile(
    r"^\s*={3,}\s*([A-Za-z][A-Za-z /]{2,40}?)\s*={3,}\s*$|^\s*(System Info|PyTorch Info|Python Environment|CUDA / GPU Info|CPU Info|Versions of relevant libraries|vLLM Info|Environment Variables)\s*$"
)
_VARIABLE = re.compile(
    r"^\s*(?:export\s+|-e\s+|--env[= ])?((?:SGLANG|SGL|NCCL|CUDA|FLASHINFER|VLLM|TORCH|PYTORCH|TRITON|NVIDIA|OMP|HF_HUB)_[A-Z0-9_]{1,60})\s*[=:]\s*[\"']?([^\s\"']{0,80})[\"']?(?=\s|$)"
)
_SAFE_VALUE = re.compile(
    r"(?:\d{1,12}(?:\.\d{1,6})?|true|false|on|off|yes|no|none|info|warn|debug|trace|all|lazy|eager|ring|tree|spawn|fork|[A-Z][A-Za-z]{1,15}|\d{1,2}\.\d[af]?(?:[ ;,]\d{1,2}\.\d[af]?){0,8}|\d{1,2}(?:,\d{1,2}){1,15}|[a-z_]{2,32}:(?:True|False|\d{1,6}))",
    re.IGNORECASE,
)
_SECRET = re.compile(
    r"TOKEN|SECRET|PASSWORD|ACCESS|API|KEY|USER|HOST|ADDR|SOCKET|IFNAME|HCA|PATH|DIR|HOME|CACHE|FILE|URL|ENDPOINT|VISIBLE_DEVICES"
)


def _full(pattern: str, text: str) -> str | None:
    return text.strip() if re.fullmatch(pattern, text.strip()) else None


def _archs(text: str) -> str | None:
    found = [value for match in _ARCH.findall(text) if (value := forms.capability(match))]
    return ", ".join(dict.fromkeys(found)) or None


def _indices(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def section(line: Line) -> str | None:
    """The title of a section of vLLM's or flashinfer's report, if the line is one."""
    found = _TITLE.match(line.text)
    return (found[1] or found[2]).strip() if found else None


def keyed(lines: Sequence[Line]) -> Iterator[Fact]:
    """The facts of every `Key: value` line, those of Markdown tables too; GPUs one fact an index, `gpu.0`."""
    block = _blocks(lines)
    alone = 0
    for at, line in enumerate(lines):
        if line.prompt:
            continue
        yield from _variables(line)
        if names := _alone(line.text):
            # One name a line is what `--query-gpu=name` prints: rows in a row are GPUs of one host.
            for name in names:
                yield Fact(f"gpu.{alone}", name, line=line.number, source=_TABLE)
                alone += 1
            continue
        alone = 0
        if found := _UNAME.match(line.text):
            yield Fact("arch", found[1] or found[2], line=line.number, source=_TABLE)
            continue
        if found := _GPU_CAPABILITY.match(line.text):
            value = forms.capability(found[2])
            for index in _indices(found[1]) if value else []:
                yield Fact(f"capability.{index}", value or "", line=line.number, source="check_env")
            continue
        if found := _GPU_LINE.match(line.text):
            yield from _gpus(found, line, block[at] or "nvidia-smi")
            continue
        pair = _pair(line.text)
        if pair is None:
            continue
        key, value = pair
        yield from _of(key, value, line, block[at])


def _alone(text: str) -> list[str]:
    """The GPUs of a line that has a known product's whole name and nothing else: `NVIDIA L4`, `2x NVIDIA H200`.

    A model's number without the maker's or the series' name (`A2`) may be anything.
    """
    stripped = text.strip().lstrip("-*• ").rstrip(".")
    counted = _COUNTED_ALONE.match(stripped)
    count, written = (min(int(counted[1]), 64), counted[2]) if counted else (1, stripped)
    name = forms.gpu(written)
    whole = name is not None and name == " ".join(written.split()) and " " in name
    return [name] * count if name and whole and forms.product(name) else []


def _gpus(found: re.Match[str], line: Line, source: str) -> Iterator[Fact]:
    name = forms.gpu(found[2])
    sm = re.search(r"\|\s*(SM\d{2,3})\b", found[2])
    for index in _indices(found[1]):
        if name and not forms.gpu_cut(found[2].partition("|")[0]):
            yield Fact(f"gpu.{index}", name, line=line.number, source=source)
        if sm and (value := forms.capability(sm[1])):
            yield Fact(f"capability.{index}", value, line=line.number, source=source)


def _of(key: str, value: str, line: Line, block: str) -> Iterator[Fact]:
    row = KEYS.get(key)
    if row is not None:
        if UNKNOWN.match(value):
            # Tools write their words where a value was not had: known to be unknown, which is not absent.
            return
        if row.fact == "gpu":
            yield from _named_gpus(value, line, block or row.source)
            return
        named = row.fact.removeprefix("package.")
        made = forms.release_of(named, value) if named != row.fact else row.form(value)
        if made is not None:
            yield Fact(row.fact, made, line=line.number, source=block or row.source)
        return
    name = forms.package(key)
    if name is None or name not in KNOWN_PACKAGES:
        return
    name = _PACKAGES.get(name, name)
    if ABSENT.match(value):
        yield Fact(f"package.{name}", "", line=line.number, source=block or _TABLE, absent=True)
    elif (made := forms.release_of(name, value)) is not None and _only_version(value):
        yield Fact(f"package.{name}", made, line=line.number, source=block or _TABLE)


def _only_version(value: str) -> bool:
    """Whether a value is a version and little else: `7 files changed` is none."""
    return len(value.split()) <= 3 or "(" in value


def _named_gpus(value: str, line: Line, source: str) -> Iterator[Fact]:
    counted = _COUNTED.match(value)
    count, text = 1, value
    if counted and forms.gpu(counted[2] or counted[3]):
        count, text = int(counted[1] or counted[4]), counted[2] or counted[3]
    name = forms.gpu(text)
    for index in range(min(count, 64) if name else 0):
        yield Fact(f"gpu.{index}", name or "", line=line.number, source=source)
    capability = re.search(r"\b(?:sm_?|compute capability:? ?)(\d{2,3}[af]?|\d{1,2}\.\d)\b", value, re.IGNORECASE)
    if capability and (made := forms.capability(capability[1])):
        for index in range(min(count, 64)):
            yield Fact(f"capability.{index}", made, line=line.number, source=source)


def _variables(line: Line) -> Iterator[Fact]:
    found = _VARIABLE.match(line.text)
    if found and not _SECRET.search(found[1]) and _SAFE_VALUE.fullmatch(found[2]):
        yield Fact(f"env.{found[1]}", found[2], line=line.number, source="environment")


def _pair(text: str) -> tuple[str, str] | None:
    """Key and value of `Key : value`, `- **Key**: value`, `| Key | value |`; the key in lower case."""
    stripped = text.strip()
    if stripped.startswith("|"):
        cells = [cell.strip(" *`") for cell in stripped.strip("|").split("|")]
        if len(cells) < 2 or not cells[0] or set(cells[1]) <= set("-: "):
            return None
        return cells[0].lower().rstrip(":").strip(), cells[1]
    found = re.match(
        r"^\s*(?:[-*+•]\s+|\d{1,2}[.)]\s+)?[*_`]{0,3}([A-Za-z][\w .()/+&-]{0,60}?)[*_`]{0,3}\s*[:=](?!=)\s*[*_`]{0,3}\s?(.*)$",
        text,
    )
    if found is None:
        return None
    return re.sub(r"\s+", " ", found[1].strip().lower()), found[2].strip(" *`")


def _blocks(lines: Sequence[Line]) -> list[str]:
    """For each line the kind of report that it stands in: check_env from `Python:` to `ulimit`, collect_env by its sections."""
    kinds, current, left = [], "", 0
    for line in lines:
        text = line.text.strip()
        lowered = text.lower()
        if re.match(r"python: ?\d\.\d", lowered):
            current = "check_env"
        elif lowered.startswith(("collecting environment information", "pytorch version")) or section(line):
            current = "collect_env"
        elif current == "check_env" and re.match(
            r"(?:nvidia topology|amd topology|ulimit soft|hypervisor vendor|traceback)", lowered
        ):
            left = 1
        kinds.append(current)
        if left:
            current, left = "", 0
    return kinds
