"""What a driver or a kernel says when it fails, and what that means. Standard library only.

The words are those of cudaGetErrorString, cuGetErrorString, the loader and NCCL; the meanings are the CUDA runtime API's ("Error
handling", cudaError) and what public reports found. Of compute capability 12.x the rules are documented, not run by us.
"""

from __future__ import annotations

MEANINGS = (
    (
        "no kernel image is available",
        (
            "the file has no code for this GPU: `builder arch FILE --gpu CC` says what is in it; a cubin with the suffix `a` runs on one "
            "compute capability alone (sm_120a on 12.0, not on 12.1)"
        ),
    ),
    (
        "compiled with an unsupported toolchain",
        "there is only PTX for this GPU, and it is newer than the driver: `builder arch FILE --gpu CC --driver V`",
    ),
    ("unsupported PTX version", "there is only PTX for this GPU, and it is newer than the driver"),
    (
        "CUDA driver version is insufficient",
        "the driver is older than the image's CUDA: a newer driver is needed on the host",
    ),
    (
        "driver on your system is too old",
        "the driver is older than the image's CUDA: a newer driver is needed on the host",
    ),
    (
        "system not yet initialized",
        "error 802: a host with NVSwitch needs the fabric manager of the driver's very version, running",
    ),
    (
        "unsupported display driver / cuda driver combination",
        (
            "error 803: the driver's libraries in the container are not those of the host's kernel module, or forward-compatibility "
            "libraries are on the loader's path"
        ),
    ),
    (
        "forward compatibility was attempted on non supported HW",
        "error 804: forward-compatibility libraries are on the loader's path, and this GPU does not allow them",
    ),
    ("no CUDA-capable device is detected", "the container has no GPU, or the driver's kernel module is not loaded"),
    (
        "device-side assert triggered",
        "a kernel has found an index or value out of range, and says which on standard error; the process is lost, the GPU is not",
    ),
    (
        "illegal memory access",
        "a kernel has read or written outside of its memory; the process is lost, the GPU is not",
    ),
    ("unspecified launch failure", "a kernel has faulted; `dmesg` on the host has an Xid for it"),
    ("an illegal instruction was encountered", "a kernel was compiled for another GPU, or has faulted"),
    ("uncorrectable ECC error", "the GPU's memory is damaged: `nvidia-smi -q -d ECC` on the host"),
    ("out of memory", "another process holds the GPU's memory: `nvidia-smi` on the host"),
    ("undefined symbol", "it was built for another torch: `builder abi` names what is missing"),
    (
        "cannot open shared object file",
        "a library is missing: `builder smoke IMAGE` says which, and from where it comes",
    ),
    (
        "peer access is not supported between these two devices",
        "the GPUs do not reach each other's memory: `--nccl-p2p off` (docs/launch.md)",
    ),
)


def meaning(words: str) -> str:
    """What is known of an error's words; empty where nothing is."""
    low = words.lower()
    return next((known for said, known in MEANINGS if said.lower() in low), "")
