"""Regions and clocks by themselves: each hazard, and what makes it none."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.step.isa import Opcode
from headrace.step.oracle.clocks import Clocks, Counter
from headrace.step.oracle.errors import HazardError
from headrace.step.oracle.memory import Regions, Toucher

WRITER, READER, OTHER = 1, 3, 5  # consumers of three SMs


def by(agent: int, *, epoch: int = 1, layer: int = 0, opcode: Opcode = Opcode.QKV_PROJ) -> Toucher:
    return Toucher(agent, epoch, layer, opcode, f"agent {agent}")


@pytest.fixture
def clocks() -> Clocks:
    return Clocks(3)


def hand_over(clocks: Clocks, giver: int, taker: int) -> None:
    clocks.acquire(taker, clocks.release(giver))


def test_what_nobody_wrote(clocks: Clocks) -> None:
    with pytest.raises(HazardError, match=r"agent 3 reads what nobody has written for it: B\[2\]"):
        Regions("B", (4,), clocks).read(slice(2, 3), by(READER))


def test_what_was_not_published(clocks: Clocks) -> None:
    regions = Regions("B", (4,), clocks)
    regions.write(slice(0, 4), by(WRITER))
    regions.read(slice(0, 4), by(WRITER))
    with pytest.raises(HazardError, match=r"not published to it: B\[0\], written by SM 0"):
        regions.read(slice(0, 4), by(READER))
    hand_over(clocks, WRITER, READER)
    regions.read(slice(0, 4), by(READER))
    hand_over(clocks, READER, WRITER)
    regions.write(slice(1, 2), by(WRITER, epoch=2))
    with pytest.raises(HazardError, match=r"a later layer or step has overwritten: B\[1\]"):
        regions.read(slice(0, 4), by(READER))


def test_publication_passes_through_a_third(clocks: Clocks) -> None:
    regions = Regions("B", (1,), clocks)
    regions.write(0, by(WRITER))
    hand_over(clocks, WRITER, OTHER)
    hand_over(clocks, OTHER, READER)
    regions.read(0, by(READER))


def test_what_was_written_after_the_signal(clocks: Clocks) -> None:
    regions = Regions("B", (1,), clocks)
    hand_over(clocks, WRITER, READER)
    regions.write(0, by(WRITER))
    with pytest.raises(HazardError, match="not published"):
        regions.read(0, by(READER))


def test_data_of_another_layer_or_step(clocks: Clocks) -> None:
    regions = Regions("B", (1,), clocks)
    regions.write(0, by(WRITER, layer=2))
    hand_over(clocks, WRITER, READER)
    regions.read(0, by(READER, layer=2, opcode=Opcode.ATTENTION))
    for later in (by(READER, layer=3), by(READER, layer=2, epoch=2)):
        with pytest.raises(HazardError, match="nobody has written for it"):
            regions.read(0, later)


def test_a_mixture_of_two_layers(clocks: Clocks) -> None:
    """The residual stream passes between layers, but all of it at once."""
    regions = Regions("X", (2,), clocks, between=True)
    regions.write(slice(0, 2), by(WRITER, layer=1, opcode=Opcode.EXPERT_DOWN))
    hand_over(clocks, WRITER, READER)
    regions.read(slice(0, 2), by(READER, layer=2))
    regions.write(slice(0, 1), by(READER, layer=2, opcode=Opcode.EXPERT_DOWN))
    with pytest.raises(HazardError, match=r"X\[1\]"):
        regions.read(slice(0, 2), by(READER, layer=3))


def test_overwriting_what_may_still_be_read(clocks: Clocks) -> None:
    regions = Regions("B", (1,), clocks)
    regions.write(0, by(WRITER))
    hand_over(clocks, WRITER, READER)
    regions.read(0, by(READER))
    with pytest.raises(HazardError, match=r"agent 1 overwrites what another task may still read"):
        regions.write(0, by(WRITER, layer=1))
    hand_over(clocks, READER, WRITER)
    regions.write(0, by(WRITER, layer=1))


def test_two_writers_at_once(clocks: Clocks) -> None:
    regions = Regions("B", (1,), clocks)
    regions.write(0, by(WRITER))
    with pytest.raises(HazardError, match="may still be being written"):
        regions.write(0, by(OTHER))


def test_additions_disturb_only_readers_and_clearers(clocks: Clocks) -> None:
    regions = Regions("H", (1, 2), clocks, summed=True)
    regions.add((0, 1), by(WRITER))
    regions.add((0, 1), by(OTHER))
    hand_over(clocks, WRITER, READER)
    for touch in (regions.read, regions.write):
        with pytest.raises(HazardError, match=r"H\[0, 1\]"):  # OTHER's may be on its way
            touch((0, 1), by(READER))
    hand_over(clocks, OTHER, READER)
    regions.read((0, 1), by(READER))
    regions.write((0, 1), by(READER))
    with pytest.raises(HazardError, match="may still read"):
        regions.add((0, 1), by(OTHER, epoch=2))
    regions.write((0, 0), by(READER))
    with pytest.raises(HazardError, match="adds to what may not have been cleared"):
        regions.add((0, 0), by(OTHER, epoch=2))
    hand_over(clocks, READER, OTHER)
    regions.add((0, slice(0, 2)), by(OTHER, epoch=2))


def test_between_launches_all_is_known(clocks: Clocks) -> None:
    regions = Regions("B", (1,), clocks)
    regions.write(0, by(WRITER))
    clocks.synchronize()
    regions.read(0, by(READER))
    hand_over(clocks, READER, OTHER)
    regions.write(0, by(OTHER))
    with pytest.raises(HazardError, match="not published"):
        regions.read(0, by(WRITER))


def test_a_counter_vouches_for_the_first_arrivals_only(clocks: Clocks) -> None:
    counter = Counter()
    counter.add(2, clocks.release(WRITER))
    counter.add(1, clocks.release(OTHER))
    assert counter.value == 3
    first, both = counter.evidence(2), counter.evidence(3)
    assert first is not None
    assert both is not None
    assert (first[WRITER], first[OTHER]) == (1, 0)
    assert (both[WRITER], both[OTHER]) == (1, 1)
    counter.settle()
    assert counter.evidence(3) is None
    assert counter.value == 3
    np.testing.assert_array_equal(clocks.known(READER), [0, 0, 0, 1, 0, 0])
