"""Layer plan × facts → the spec that the smoke test reads in the image: every fact about a version as data.

The native part's spec does not know sglang, so that a new patch level of sglang leaves that part in the build cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from builder import facts
from builder.files import canonical_json, sha256_hex
from builder.layers import LayerPlan
from builder.ledger import applying, exceptions, locked, smoke_facts, variants
from builder.matrix import Matrix

SCHEMA = 1


def smoke_spec(plan: LayerPlan, *, native: bool, patches: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The spec of the native part, or of the whole image; ``patches`` are the reports of `builder.patches`."""
    known = dict(smoke_facts())
    imports, shared = known.pop("imports"), known.pop("shared_files", [])
    if plan.lock.version_of("sglang") is None or native:
        known["registries"] = []
    artefacts = [artefact for artefact in plan.artefacts if not (native and artefact.layer == "sglang")]
    versions = {artefact.name: artefact.version for artefact in artefacts}
    listed = [
        {key: getattr(artefact, key) for key in ("name", "version", "metadata_version", "file", "sha256", "layer")}
        for artefact in artefacts
    ]
    below = [item for item in listed if item["layer"] != "sglang"]
    native_lock = sha256_hex(canonical_json(below))
    cuda = plan.matrix.cuda
    known["cuda_packages"] = {**known["cuda_packages"], "both": _of_both(versions)}
    grouped = [_plain(asdict(each)) for each in variants(versions)]
    return {
        "schema": SCHEMA,
        # The native part is one for all matrices that share what is below sglang: it does not know its matrix's name.
        "matrix": "native" if native else plan.matrix.name,
        "lock": native_lock if native else plan.lock.digest,
        "native_lock": native_lock,
        "site_packages": plan.site_packages,
        "cuda": {
            "version": cuda.version,
            "major": int(cuda.version.split(".")[0]),
            "home": plan.cuda_home,
            "jit": "nvcc" if plan.cuda_home else "none",
        },
        "gpus": gpu_targets(plan.matrix.gpus),
        "compiled": list(plan.compiled),
        "artefacts": listed,
        "exceptions": [
            *(_plain(entry) for entry in exceptions() if applying(entry, versions)),
            *_differences(plan.matrix, versions),
        ],
        **({"variants": grouped} if grouped else {}),
        "shared_files": [_plain(entry) for entry in shared if _shares(entry, versions)],
        "imports": []
        if native
        else [each["module"] for each in imports if locked("sglang", each.get("versions"), versions)],
        "facts": _plain(known),
        **({} if native or not patches else {"patches": list(patches)}),
    }


def _shares(entry: Mapping[str, Any], versions: Mapping[str, str]) -> bool:
    """Whether an entry is about the release that wins; of what is not there the smoke test says so itself."""
    return entry["wins"] not in versions or locked(entry["wins"], entry.get("versions"), versions)


def _of_both(versions: Mapping[str, str]) -> list[str]:
    """Of these packages those that are beside either CUDA, whatever their names say: facts/cuda-majors.yaml."""
    found = [fact for fact in facts.load_facts(facts.CudaMajorFact) if fact.major == "both"]
    return sorted(name for fact in found for name in fact.packages if locked(name, fact.versions, versions))


def _differences(matrix: Matrix, versions: Mapping[str, str]) -> list[dict[str, Any]]:
    """What a stand-in may fail."""
    if matrix.stand_in is None:
        return []
    source = f"`stand_in` of {matrix.name}.yaml"
    return [
        {**_plain(item.model_dump(mode="json")), "source": source}
        for item in matrix.stand_in.differences
        if item.distribution in versions
    ]


def gpu_targets(capabilities: tuple[str, ...]) -> list[dict[str, str]]:
    """The GPU targets as the smoke test needs them, from facts/gpus.yaml."""
    by_capability = {fact.capability: fact for fact in facts.load_facts(facts.GpuFact)}
    return [
        {
            "capability": capability,
            "nvcc": by_capability[capability].nvcc_arch,
            "flashinfer": by_capability[capability].flashinfer_arch,
        }
        for capability in capabilities
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
