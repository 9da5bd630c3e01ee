"""Builds that are no public release: a vendor's own, a nightly, one from source. Their version says so."""

from __future__ import annotations

import re

from builder.facts import VendorBuildFact, load_facts


def vendor_build(package: str, version: str) -> VendorBuildFact | None:
    """What a version (as PEP 440 writes it) says of where its build comes from; `None` where no fact is about it."""
    found = (fact for fact in load_facts(VendorBuildFact) if fact.package == package)
    return next((fact for fact in found if re.fullmatch(fact.pattern, version)), None)
