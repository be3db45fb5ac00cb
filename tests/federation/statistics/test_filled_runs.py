"""Each value of a run that is filled from statistics is edited: both verifiers refuse it, or the page lists it."""

from pathlib import Path

import numpy as np
import pytest

from federation.digests import digest
from federation.record.bundle import blob_entry
from federation.trust.envelope import envelope_digest
from federation.v1.record_pb2 import Bundle
from federation.vectors import Layout
from storage.states import RunState
from tests.filled import WHOLE, described, filled, keys
from tests.stage import LAYOUT, Stage, answer, spec
from tests.verification import every_value
from tests.verification.every_value import edits, signed_anew
from tests.verification.independent_verifier import Wrong
from tests.verification.independent_verifier import verify as verify_independently
from tests.verification.recorded import FREE, NAMED, SIGNED, Recorded, by, check_listed
from tests.verification.scene import Edited, exported, refusal


def recorded(stage: Stage, path: Path, *, rounds: int = 2) -> Recorded:
    """A run of plain averaging whose model is filled from a result."""
    task, players = stage.crew("ada", "ben")
    result, told = described(stage, task, players)
    asked = spec("filled", task, rounds, algorithm="fedavg", **keys(envelope_digest(result)))
    run = stage.submit(asked, model=filled(told))
    for _ in range(2 * rounds):  # each round trains and evaluates
        answer(*players)
    stage.wait_state(run, RunState.COMPLETED)
    held = {player.name: player.member.files.signing_key for player in players}
    held |= {"coordinator": stage.served.home.signing_key, "log": stage.served.home.log_key.key}
    return Recorded(Edited.of(exported(stage, run, path / "run.fedpareto")), held)


def models(bundle: Edited) -> list[str]:
    """The digests of the initial model and of the model of each round."""
    steps = [every_value.opened(bundle.round(at).step, bundle.round(at), "step") for at in range(bundle.about.rounds)]
    return [bundle.about.initial_model, *(step.result_model for step in steps)]  # type: ignore[attr-defined]


def with_models(recorded: Recorded, changed: dict[str, bytes]) -> Edited:
    """The bundle with other models, by their former digests; somebody who has all keys signs again what follows."""
    now = {old: digest(data) for old, data in changed.items()}
    entries: dict[str, bytes | None] = {blob_entry(old): None for old in changed}
    entries |= {blob_entry(now[old]): data for old, data in changed.items()}
    bundle = recorded.bundle.having(entries)

    def tell(about: Bundle) -> None:
        about.initial_model, about.model = (now.get(one, one) for one in (about.initial_model, about.model))

    bundle = bundle.telling(tell)
    follows = {old.encode(): new.encode() for old, new in now.items()}
    return signed_anew(bundle, every_value.messages(bundle), recorded.holders, recorded.keys["log"], follows)


def changed(model: bytes, place: int, layout: Layout = WHOLE) -> bytes:
    """A model, one of whose numbers is larger by its last bit."""
    at = len(model) - 4 * layout.size + 4 * place
    (number,) = np.frombuffer(model[at : at + 4], "<f4")
    larger: bytes = np.nextafter(number, np.float32(np.inf)).astype("<f4").tobytes()
    return model[:at] + larger + model[at + 4 :]


def refused_independently(bundle: Edited, path: Path) -> str:
    with pytest.raises(Wrong) as raised:
        verify_independently(bundle.write(path / "edited"))
    return str(raised.value)


def test_both_verifiers_compare_the_fixed_numbers_of_each_model_with_the_signed_result(
    stage: Stage, tmp_path: Path
) -> None:
    made = recorded(stage, tmp_path, rounds=1)
    assert verify_independently(tmp_path / "run.fedpareto").missing == []
    bundle, names = made.bundle, models(made.bundle)
    files = {name: bundle.entries[blob_entry(name)] for name in names}
    assert verify_independently(with_models(made, {}).write(tmp_path / "same")).missing == []
    last = LAYOUT.size + 3
    everywhere = with_models(made, {name: changed(data, last) for name, data in files.items()})
    assert "is not filled from the statistics" in refusal(everywhere, tmp_path)
    assert "scale.deviation" in refused_independently(everywhere, tmp_path)
    later = with_models(made, {names[1]: changed(files[names[1]], last)})
    assert "the fixed tensors: number" in refusal(later, tmp_path)
    assert "fixed tensors" in refused_independently(later, tmp_path)


@pytest.mark.full
def test_each_fixed_number_of_each_model_is_bound(stage: Stage, tmp_path: Path) -> None:
    made = recorded(stage, tmp_path)
    names = models(made.bundle)
    files = {name: made.bundle.entries[blob_entry(name)] for name in names}
    for place in range(LAYOUT.size, WHOLE.size):
        for some in (*([name] for name in names), names[1:], names):
            bundle = with_models(made, {name: changed(files[name], place) for name in some})
            assert refusal(bundle, tmp_path), (place, some)
            assert refused_independently(bundle, tmp_path), (place, some)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_each_edit_of_a_filled_run_is_refused_by_both_verifiers_or_listed(stage: Stage, tmp_path: Path) -> None:
    made = recorded(stage, tmp_path)
    chosen = {name: edit for name, edit in edits(made.bundle).items() if "LoggedEntry" not in name}
    new = {edit.value for edit in chosen.values()}
    assert new >= {"filling DescribedData.result", "filling DescribedData.document", "filling ResultManifest.document"}
    free, count = check_listed(made, chosen, tmp_path / "edited")
    assert count > len(chosen)
    listed = {edit.value for edit in chosen.values() if by(edit).startswith((FREE, SIGNED))}
    assert {value for value in listed - free if value.startswith("filling ")} == set()

    def accepted(bundle: Edited) -> bool:
        try:
            return not verify_independently(bundle.write(tmp_path / "edited")).missing
        except (Wrong, ValueError, KeyError, TypeError, OverflowError):  # a parser of Python's refuses, too
            return False

    assert accepted(made.again())
    kinds = ("DescribedData", "ResultManifest", "UnsharedParameters")
    bound = [
        edit
        for edit in chosen.values()
        if not by(edit).startswith((FREE, SIGNED, NAMED)) and edit.value.rpartition(" ")[2].startswith(kinds)
    ]
    log = made.keys["log"]
    missed = [edit.name for edit in bound if accepted(every_value.edited(made.bundle, edit, made.holders, log))]
    assert missed == []
