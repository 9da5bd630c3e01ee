"""The shapes of the facts that environment reports are read with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from builder.facts.base import Fact
from builder.fields import Capability, EntryName, Form, NotEmpty, Prose


class GpuNameFact(Fact):
    """Products by the words in their names, and the compute capability they have."""

    file = "gpu-names"

    capability: Capability
    """the compute capability, as in 12.0"""
    names: Annotated[tuple[Prose, ...], NotEmpty()]
    """what stands in the product's name, as nvidia-smi gives it, as in RTX PRO 6000 Blackwell"""
    machine: Literal["aarch64", "x86_64"] | None = None
    """the processor, where the product comes with one"""


class SymptomFact(Fact):
    """What the words of an error say by themselves."""

    file = "symptoms"

    kind: Annotated[str, Form("a kind of symptom", r"[a-z0-9]+(-[a-z0-9]+)*", "as in no-space", max_length=60)]
    """the kind, as builder/reports/symptoms.py names it"""
    parts: Mapping[EntryName, Prose] = Field(default_factory=dict)
    """what the error has to name, as in function: TllmGenFmhaRunner"""
    capabilities: tuple[Capability, ...] = ()
    """the compute capabilities that it is about; any, unless there are some"""
    products: tuple[Prose, ...] = ()
    """words in the names of the GPUs that it is about; any, unless there are some"""
    because: Prose
    """why it happens"""
    hint: Prose
    """what to do"""
