"""Processors round differently: rounds that were made on one of them are verified, and go on, on another."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federation.aggregation.phases import Voided
from federation.secure.thresholds import ONE, Mode
from tests.federation.work.scene import cast, equal, play, setting
from tests.few import few
from tests.harness import python
from tests.paths import PROGRAMS, ROOT
from tests.programs.processors import RULES
from tests.worker.work.scene import scene as federation_scene

# The instructions that each kind of OpenBLAS needs, as Linux names them.
NEEDS = {
    "SkylakeX": {"avx512f", "avx512bw", "avx512vl"},
    "Zen": {"avx2", "fma"},
    "Haswell": {"avx2", "fma"},
    "Sandybridge": {"avx"},
    "Nehalem": {"sse4_2"},
    "Prescott": {"pni"},
}


def flags() -> set[str]:
    """What this machine's processor can do."""
    text = Path("/proc/cpuinfo").read_text()
    return {word for line in text.splitlines() if line.startswith("flags") for word in line.split(":")[1].split()}


ABLE = [name for name, needed in NEEDS.items() if needed <= flags()]


def needs(*names: str) -> None:
    for name in names:
        if name not in ABLE:
            pytest.skip(f"this processor cannot run the instructions of {name}")


def run(core: str, *arguments: str) -> list[str]:
    """What tests/programs/processors.py prints with the arithmetic of this kind of processor."""
    environment: Any = {"OPENBLAS_CORETYPE": core, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return python(PROGRAMS / "processors.py", *arguments, **environment).stdout.splitlines()


def verified(file: Path, core: str) -> None:
    *refused, architecture = run(core, "verify", str(file))
    assert not refused
    assert architecture


@pytest.mark.skipif(len(ABLE) < 2, reason="this processor can run the instructions of one kind only")
@pytest.mark.full
def test_rounds_that_were_made_on_one_processor_are_verified_on_another(tmp_path: Path) -> None:
    file = tmp_path / "rounds"
    first, *_, last = ABLE
    made = run(first, "make", str(file), "1", "2")[-1]
    assert run(last, "verify", str(file))[-1] != made, "the same arithmetic shows nothing"
    verified(file, last)


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rounds of every rule, made with the arithmetic of Haswell."""
    needs("Haswell")
    file = tmp_path_factory.mktemp("processors") / "rounds"
    run("Haswell", "make", str(file), str(len(RULES)), "3")
    return file


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("core", list(NEEDS))
def test_rounds_of_every_rule_are_verified_on_every_processor(core: str, rounds: Path) -> None:
    needs(core)
    verified(rounds, core)


def asked_with(changes: Mapping[int, int], mode: Mode = Mode.PRIVATE) -> Sequence[int]:
    """The coefficients of a sum whose members had been asked with equal ones, changed by these units."""
    members = cast(8, assumed=1)
    agreed = setting(members, mode)
    asked = [ONE // 8] * 8
    for place, units in changes.items():
        asked[place] += units
    return play(members, mode, equal, replace(agreed, asked=tuple(asked))).record.coefficients


@few(Mode.PRIVATE)
@pytest.mark.parametrize("mode", list(Mode))
def test_a_coordinator_goes_on_with_the_coefficients_that_members_were_asked_with(mode: Mode) -> None:
    asked = asked_with({0: -1, 5: -1}, mode)
    assert asked == (ONE // 8 - 1, *[ONE // 8] * 4, ONE // 8 - 1, *[ONE // 8] * 2)


@few(Mode.PRIVATE)
@pytest.mark.parametrize("mode", list(Mode))
def test_coefficients_of_another_direction_void_the_attempt(mode: Mode) -> None:
    with pytest.raises(Voided, match="another direction"):
        asked_with({0: -(2**12), 1: 2**12}, mode)


def test_coefficients_that_members_refuse_and_those_of_other_members_void_the_attempt() -> None:
    with pytest.raises(Voided, match="add up to"):
        asked_with({0: 1})
    members = cast(8, assumed=1)
    agreed = replace(setting(members, Mode.PRIVATE), asked=(ONE // 9,) * 9)
    with pytest.raises(Voided, match="8 members were asked with 9 coefficients"):
        play(members, Mode.PRIVATE, equal, agreed)


SPEC = """\
task = "two-digits"
rounds = 1
algorithm.name = "fedmgda+"
selection.minimum = 8
train = { steps = 2, batch_size = 20 }
evaluate.every = 0
privacy.secure = "private"
"""
MASK = 4  # the phase, after READY, DEAL and two openings


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_coordinator_that_is_killed_goes_on_with_another_arithmetic(tmp_path: Path) -> None:
    needs("Haswell", "Nehalem")
    with federation_scene(tmp_path, 8) as scene:
        fed = scene.fed
        fed.serving.stop()
        dying = fed.serve(program=served("Haswell", str(PROGRAMS / "crashing.py"), f"phase-{MASK + 1}"))
        name = fed.submit("moved", SPEC, crash=True)
        dying.wait_killed()
        fed.serve(program=served("Nehalem", "-m", "fedpareto"))
        fed.wait_completed(name)
        settled = scene.settled(name)
        assert np.isclose(sum(settled.coefficients), ONE)
        bundle = tmp_path / "run.bundle"
        fed.admin("bundle", name, "--payloads", "--yes", "--out", str(bundle))
        for core in ABLE:
            python("-m", "fedpareto", "verify", bundle, OPENBLAS_CORETYPE=core)


def served(core: str, *program: str) -> str:
    """A Python program that becomes the coordinator, with this arithmetic."""
    return (
        "import os, sys\n"
        f"os.environ['OPENBLAS_CORETYPE'] = {core!r}\n"
        f"os.execv(sys.executable, [sys.executable, *{list(program)!r}, *sys.argv[1:]])\n"
    )
