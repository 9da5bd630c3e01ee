"""What went wrong, recognised by the words that programs use for it, and told again in those words with nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from builder.reports import forms
from builder.reports.lines import Line
from builder.reports.model import Symptom

_NAME = r"[A-Za-z_][\w.]{0,120}"
_SO = r"[A-Za-z0-9_.+-]{1,80}\.so(?:\.\d{1,4}){0,4}"
# `name@GLIBC_2.34`, `name@libcudart.so.12`. What else stands behind an `@` is a person's machine, and the name may be too.
_SYMBOL_VERSION = r"(?:[A-Z][A-Z0-9]{1,20}_[\d.]{1,12}|lib[A-Za-z0-9_]{1,40}\.so[.\d]{0,12})"
_VERSION = r"\d[\w.+!-]{0,40}?"


@dataclass(frozen=True)
class _Kind:
    """One kind: its pattern, the sentence made of the named groups, and what to make of a group's text."""

    name: str
    pattern: re.Pattern[str]
    sentence: str
    forms: dict[str, Callable[[str], str | None]]


def _kind(name: str, pattern: str, sentence: str, **made: Callable[[str], str | None]) -> _Kind:
    return _Kind(name, re.compile(pattern), sentence, made)


KINDS: Sequence[_Kind] = (
    _kind(
        "undefined-symbol",
        rf"(?:(?P<file>{_SO}): )?undefined symbol: (?P<symbol>[A-Za-z_][\w.]{{0,400}}(?:@{{1,2}}{_SYMBOL_VERSION})?)(?![\w@])",
        "{file}: undefined symbol: {symbol}",
    ),
    _kind(
        "missing-library",
        rf"(?P<library>{_SO}): cannot open shared object file",
        "{library}: cannot open shared object file",
    ),
    _kind(
        "missing-version",
        rf"(?:(?P<file>{_SO}): )?(?:version )?[`'‘]?(?P<version>(?:GLIBC|GLIBCXX|CXXABI|GCC)_\d[\d.]{{0,11}})['’`]{{0,2}} not found",
        "{file}: version `{version}' not found",
    ),
    _kind("abi-assert", r"(?P<what>Expected that the C\+\+ ABI|std::string ABI)", "{what}"),
    _kind(
        "no-kernel-image",
        r"no kernel image is available for execution on the device",
        "no kernel image is available for execution on the device",
    ),
    _kind(
        "capability-range",
        r"capability supported by this version of PyTorch is \((?P<low>\d{1,2}\.\d)\) - \((?P<capability>\d{1,2}\.\d)\)",
        "outside of the CUDA capabilities ({low}) - ({capability}) that this PyTorch supports",
    ),
    _kind(
        "capability-range",
        r"(?:cuda capability|CUDA capability) (?P<capability>sm_\d{2,3}|\d{1,2}\.\d)",
        "of CUDA capability {capability}",
        capability=forms.capability,
    ),
    _kind("common-ops", r"Could not load any common_ops library", "Could not load any common_ops library!"),
    _kind(
        "driver-too-old",
        r"driver on your system is too old \(found version (?P<cuda>\d{4,5})\)",
        "the NVIDIA driver is too old (it knows CUDA {cuda})",
        cuda=forms.cuda_number,
    ),
    _kind(
        "driver-insufficient",
        r"CUDA driver version is insufficient for CUDA runtime version",
        "CUDA driver version is insufficient for CUDA runtime version",
    ),
    _kind(
        "container-requirement",
        r"unsatisfied condition: cuda\s?>=\s?(?P<cuda>\d{1,2}\.\d)",
        "unsatisfied condition: cuda>={cuda}",
    ),
    _kind(
        "cuda-error-803",
        r"Error 803|system has unsupported display driver / cuda driver combination",
        "Error 803: system has unsupported display driver / cuda driver combination",
    ),
    _kind(
        "cuda-error-804",
        r"Error 804|forward compatibility was attempted on non supported HW",
        "Error 804: forward compatibility was attempted on non supported HW",
    ),
    _kind("cuda-error-802", r"Error 802|system not yet initialized", "Error 802: system not yet initialized"),
    _kind(
        "unsupported-architecture",
        rf"(?:in function '(?P<function>{_NAME})'.{{0,200}})?Unsupported architecture",
        "Error in function '{function}': Unsupported architecture",
    ),
    _kind(
        "nvcc-architecture",
        r"nvcc fatal\s{0,3}:\s{0,3}Unsupported gpu architecture '(?P<arch>(?:compute|sm)_\d{2,3}[af]?)'",
        "nvcc fatal: Unsupported gpu architecture '{arch}'",
    ),
    _kind(
        "ptxas-architecture",
        r"ptxas fatal\s{0,3}:\s{0,3}Value '(?P<arch>sm_\d{2,3}[af]?)' is not defined",
        "ptxas fatal: Value '{arch}' is not defined for option 'gpu-name'",
    ),
    _kind("ptx-version", r"Unsupported \.version (?P<ptx>\d{1,2}\.\d)", "ptxas fatal: Unsupported .version {ptx}"),
    _kind("cudnn-check", r"CuDNN Compatibility Issue Detected", "PyTorch & CuDNN Compatibility Issue Detected"),
    _kind(
        "inconsistent-version",
        r"(?:Requested (?P<package>[A-Za-z0-9._-]{1,60}).{0,300})?has inconsistent (?:version|name)",
        "{package} has inconsistent version",
        package=forms.package,
    ),
    _kind("hash-mismatch", r"(?:DO NOT MATCH THE HASHES|[Hh]ash mismatch)", "hash mismatch"),
    _kind(
        "cubin-version",
        rf"flashinfer-(?P<package>cubin|jit-cache) version \((?P<found>{_VERSION})\) does not match flashinfer version \((?P<wanted>{_VERSION})\)",
        "flashinfer-{package} version ({found}) does not match flashinfer version ({wanted})",
        found=forms.version,
        wanted=forms.version,
    ),
    _kind(
        "required-version",
        rf"(?P<package>[A-Za-z0-9_-]{{2,40}}) is installed with version (?P<found>{_VERSION}),? which is less than the minimum required version (?P<wanted>{_VERSION})(?=[.\s,]|$)",
        "{package} is installed with version {found}, which is less than the minimum required version {wanted}",
        package=forms.package,
        found=forms.version,
        wanted=forms.version,
    ),
    _kind(
        "missing-operator",
        r"operator (?P<operator>[a-z_]{2,30}::[a-z_0-9]{1,60}) does not exist",
        "operator {operator} does not exist",
    ),
    _kind(
        "missing-attribute",
        rf"AttributeError: (?:module )?'(?P<owner>{_NAME})'(?: object)? has no attribute '(?P<attribute>{_NAME})'",
        "'{owner}' has no attribute '{attribute}'",
    ),
    _kind(
        "missing-attribute",
        rf"AttributeError: type object '(?P<owner>{_NAME})' has no attribute '(?P<attribute>{_NAME})'",
        "'{owner}' has no attribute '{attribute}'",
    ),
    _kind(
        "missing-name",
        rf"ImportError: cannot import name '(?P<attribute>{_NAME})' from '(?P<owner>{_NAME})'",
        "cannot import name '{attribute}' from '{owner}'",
    ),
    _kind(
        "missing-module", rf"ModuleNotFoundError: No module named '(?P<module>{_NAME})'", "No module named '{module}'"
    ),
    _kind(
        "unsupported-model",
        rf"Model architectures? \[?'?(?P<model>{_NAME})'?\]? (?:are|is) not supported",
        "Model architectures ['{model}'] are not supported",
    ),
    _kind(
        "unexpected-argument",
        rf"TypeError: (?P<function>{_NAME})(?:\(\))? got an unexpected keyword argument '(?P<attribute>{_NAME})'",
        "{function}() got an unexpected keyword argument '{attribute}'",
    ),
    _kind(
        "hub-kernel",
        r"Either a revision or a version must be specified",
        "Either a revision or a version must be specified",
    ),
    _kind(
        "collective-hang",
        r"(?:NCCL|all[-_]?reduce\w{0,20}|collective|tensor.parallel|\bTP\s?=?\s?\d|inference|generation)\b.{0,120}?\b(?:hangs?|hung|stuck|deadlock)\b|Watchdog caught collective operation timeout",
        "it hangs, or a collective operation does",
    ),
    _kind(
        "nccl-error",
        r"NCCL error\b.{0,300}?\b(?P<what>unhandled cuda error|unhandled system error|internal error|invalid argument|invalid usage|remote process exited or there was a network error)(?:.{0,100}?\bNCCL version (?P<nccl>\d{1,2}\.\d{1,3}\.\d{1,3}))?",
        "NCCL error: {what}, NCCL version {nccl}",
    ),
    _kind(
        "no-peer-access",
        r"peer access is not supported between these two devices",
        "peer access is not supported between these two devices",
    ),
    _kind(
        "certificate", r"CERTIFICATE_VERIFY_FAILED|certificate verify failed|UnknownIssuer", "certificate verify failed"
    ),
    _kind("no-space", r"No space left on device", "No space left on device"),
    _kind("bus-error", r"\bBus error\b|SIGBUS", "Bus error"),
    _kind("out-of-memory", r"CUDA out of memory|torch\.OutOfMemoryError", "CUDA out of memory"),
    _kind(
        "illegal-access",
        r"an illegal memory access was encountered|an illegal instruction was encountered",
        "an illegal memory access or instruction was encountered",
    ),
    _kind("divide-by-zero", r"\bSIGFPE\b|Floating point exception", "Floating point exception"),
    _kind("cdi-device", r"unresolvable CDI devices|failed to inject CDI devices", "unresolvable CDI devices"),
    _kind(
        "nvidia-adapter",
        r"could not select device driver .{0,20}with capabilities",
        "could not select device driver with capabilities: [[gpu]]",
    ),
)


def symptoms(lines: Sequence[Line]) -> Iterator[Symptom]:
    """What the lines say went wrong, each thing once, in their order."""
    seen: set[tuple[str, str]] = set()
    for line in lines:
        for kind in KINDS:
            found = kind.pattern.search(line.text)
            if found is None:
                continue
            parts = {}
            for name, text in found.groupdict().items():
                form = kind.forms.get(name)
                value = form(text) if form is not None and text else text
                if value:
                    parts[name] = value
            said = _sentence(kind.sentence, parts)
            if (kind.name, said) not in seen:
                seen.add((kind.name, said))
                yield Symptom(kind.name, said, line.number, parts)


def _sentence(sentence: str, parts: dict[str, str]) -> str:
    """The sentence, without what it has no name for."""
    for name in re.findall(r"{(\w+)}", sentence):
        if name not in parts:
            sentence = re.sub(
                rf"{{{name}}}: |,[^{{}},]* {{{name}}}|(?:Error in function|in function)? ?'{{{name}}}': |{{{name}}} ?",
                "",
                sentence,
            )
    return sentence.format(**parts)
