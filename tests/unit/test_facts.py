"""Facts: every file loads, has its sources, and says what the project's notes say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from builder import facts
from builder.facts import CudaFact, Fact, GpuFact, LayerFact, ToolFact, layer_of, load_facts, load_named, parse_facts
from builder.facts import schema_text as facts_schema_text
from builder.schemas import ROOT, SCHEMAS
from builder.yamlsource import SourceError

FOLDER = Path(facts.__file__).parent


@pytest.mark.parametrize("name", sorted(Fact.models))
def test_a_file_loads_and_every_fact_has_a_source(name: str) -> None:
    loaded = load_named(name)
    assert loaded and all(fact.source for fact in loaded)


# The smoke test's own files: copied into its specification as they are, and checked by its tests.
OTHER_SHAPES = {"exceptions", "smoke"}
FILES = [path for path in sorted(FOLDER.glob("*.yaml")) if path.stem not in OTHER_SHAPES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_names_its_schema_and_fits_it(path: Path) -> None:
    assert path.stem in Fact.models, "every file of facts has a model"
    text = path.read_text()
    assert text.splitlines()[0] == f"# yaml-language-server: $schema=facts.schema.json#/$defs/{path.stem}"
    schema = json.loads(facts_schema_text())
    body = {"$defs": schema["$defs"], "$ref": f"#/$defs/{path.stem}"}
    Draft202012Validator(body).validate(YAML(typ="safe", pure=True).load(text))


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_a_checked_in_schema_is_current(name: str) -> None:
    assert (ROOT / name).read_text() == SCHEMAS[name](), "run `python -m builder.schemas`"
    Draft202012Validator.check_schema(json.loads(SCHEMAS[name]()))


def test_loading_is_cached() -> None:
    assert load_facts(GpuFact) is load_facts(GpuFact)


def test_gpus_are_named_alike_everywhere() -> None:
    gpus = {fact.capability: fact for fact in load_facts(GpuFact)}
    assert list(gpus) == ["8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1"]
    for capability, fact in gpus.items():
        suffix = "a" if int(capability.split(".")[0]) >= 9 else ""
        assert fact.nvcc_arch == capability.replace(".", "") + suffix
        assert fact.flashinfer_arch == capability + suffix


@pytest.mark.parametrize(("minor", "jit"), [("12.8", False), ("12.9", False), ("13.0", True)])
def test_compilers_of_a_cuda_release(minor: str, jit: bool) -> None:
    (fact,) = [fact for fact in load_facts(CudaFact) if fact.covers(minor)]
    assert fact.jit is jit
    assert bool(fact.compiler) is jit


def test_each_part_of_docker_has_one_oldest_release() -> None:
    assert sorted(fact.tool for fact in load_facts(ToolFact)) == ["buildx", "engine"]


def test_no_fact_covers_a_cuda_release_nobody_looked_at() -> None:
    assert not any(fact.covers("13.1") for fact in load_facts(CudaFact))


@pytest.mark.parametrize(
    ("distribution", "layer"),
    [
        ("torch", "torch"),
        ("torchvision", "torch"),
        ("triton", "torch"),
        ("nvidia-cublas", "torch"),
        ("nvidia_cuda_nvcc", "torch"),
        ("cuda-toolkit", "torch"),
        ("torch-memory-saver", "kernels"),
        ("sgl_kernel", "kernels"),
        ("sglang-kernel", "kernels"),
        ("flash-attn-4", "kernels"),
        ("tokenspeed-mla", "kernels"),
        ("nvidia-cutlass-dsl-libs-cu13", "kernels"),
        ("flashinfer-cubin", "flashinfer"),
        ("flashinfer-python", "flashinfer"),
        ("nvidia-ml-py", "rest"),
        ("torchao", "rest"),
        ("sglang-router", "rest"),
        ("NumPy", "rest"),
        ("SGLang", "sglang"),
    ],
)
def test_layer_of_a_distribution(distribution: str, layer: str) -> None:
    assert layer_of(distribution) == layer


def test_layers_are_in_the_order_of_the_image() -> None:
    assert [fact.layer for fact in load_facts(LayerFact)] == ["torch", "kernels", "flashinfer", "rest", "sglang"]


def test_a_fact_without_a_source_is_refused() -> None:
    text = 'facts:\n  - capability: "12.0"\n    names: [x]\n    nvcc_arch: 120a\n    flashinfer_arch: 12.0a\n    minimum_cuda: "12.8"\n'
    with pytest.raises(SourceError) as caught:
        parse_facts(GpuFact, "gpus.yaml", text)
    assert str(caught.value) == (
        "error: `facts[0].source` is missing\n"
        "  at: gpus.yaml:2:5\n"
        '  2 |   - capability: "12.0"\n'
        "    |     ^\n"
        "  hint: add it: where the knowledge comes from: a URL, a section of the project's notes, a measurement with its date"
    )
