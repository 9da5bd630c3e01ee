"""`behaviour` of symmetric memory without multicast: ranks in threads, on a stack of stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.matrix import Patches, Sm120
from tests import patch_made as made
from tests import symm_made
from tests.unit.behaviour_made import behaviour, edited, stack
from tests.unit.smoke_made import Site, finished

# Processes and servers of their own: `make processes`.
pytestmark = pytest.mark.processes

ASKED = Patches(sm120=Sm120(symm_mem="opt-in"))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    files = (made.ALL_REDUCE, made.SYMM_MEM, symm_made.PARALLEL)
    return stack(tmp_path, patches=ASKED, sglang={file: symm_made.FILES[file] for file in files})


def test_it_is_on_where_it_is_asked_for_and_all_ranks_can(site: Site) -> None:
    check = finished(behaviour(site), "behaviour")
    assert (check.ok, check.findings) == (True, ())
    assert check.looked_at == 5
    assert check.detail == "53 comparisons for S1 S2 S3 D1 S4b S4 S4c F1"


def test_it_is_on_for_other_devices(site: Site) -> None:
    found = edited(
        site, made.SYMM_MEM, "        if self.device_capability == 12 and", "        if self.device_capability >= 9 and"
    )
    assert "4 GPUs of 9.0 without multicast, asked for: on, up to 64 MiB" in found


def test_a_sum_that_nobody_looks_at(site: Site) -> None:
    found = edited(site, made.SYMM_MEM, "    wrong = bool(", "    wrong = False and bool(")
    assert found == ["4 GPUs of 12.0, one that adds up wrongly: on, up to 1 MiB"]


def test_ranks_that_do_not_vote_at_the_end(site: Site) -> None:
    found = edited(
        site,
        made.SYMM_MEM,
        '    if closed(exchange("two-shot gave a wrong sum" if wrong else None)):',
        '    if closed(["two-shot gave a wrong sum" if wrong else None]):',
    )
    assert found == ["4 GPUs of 12.0, one that adds up wrongly: on, up to 1 MiB / off"]


def test_a_rank_whose_failure_the_others_wait_for(site: Site) -> None:
    found = edited(
        site,
        made.SYMM_MEM,
        "        except Exception as error:",
        "        except ZeroDivisionError as error:",
    )
    assert "a rank waits for one that does not come" in found[0]


def test_what_symmetric_memory_does_not_take_on_sm120(site: Site) -> None:
    found = edited(
        site,
        symm_made.PARALLEL,
        "        elif torch_symm_mem_comm is not None and not torch_symm_mem_comm.disabled and"
        " torch_symm_mem_comm.device_capability != 12:",
        "        elif torch_symm_mem_comm is not None and not torch_symm_mem_comm.disabled:",
    )
    assert found == ["a message that gets past symmetric memory on 12.0: symmetric memory → None"]
