"""The numbers of a round that the privacy of its run keeps from everybody who reads the record."""

from collections.abc import Mapping
from functools import lru_cache

from coordinator.rounds.transitions import SIMULATOR
from federation.record.metric_definitions import DEFINITIONS, EVALUATION, OWN, SUMMARIES
from federation.spec.run_spec import RunSpec
from storage.models import Run

MEMBERS = ("samples", "loss_before", "update_norm", "cosine")  # fields of `Participation`, of each accepted update
_PAIRS = tuple(name for name in DEFINITIONS if name.startswith(("stationarity", "descent_", "conflict")))
_ACCURACIES = tuple(
    name for name in DEFINITIONS if name.startswith("accuracy/") and "<" not in name and name != "accuracy/mean"
)
_LOSSES = ("loss/jain", "loss/worst")  # of a task without accuracy


def undisclosed(spec: RunSpec, metrics: Mapping[str, float], *, stepped: bool, conceals: bool) -> tuple[str, ...]:
    """The names of the numbers that an open run would have in a round, and this one hides.

    They are names of metrics, and of fields of `Participation`. A number that the round has is never among them. A
    round without a step hides nothing, and one that was not evaluated hides no evaluation.

    Args:
        spec: of the run.
        metrics: of the round.
        stepped: True if the round has made a step.
        conceals: True if the replies stay hidden, since noise protects the clients; not so in a simulation.
    """
    privacy = spec.privacy
    if not stepped or (privacy.secure == "off" and not conceals):
        return ()
    names = [*MEMBERS, *_PAIRS]
    if conceals:
        names += ["weight", "direction_norm", "entropy"]
        if spec.evaluated:
            losses = (f"loss/{split}" for split in spec.evaluated)
            names += ["accuracy/mean", *_ACCURACIES, *losses, *_LOSSES, "improved", EVALUATION]
    elif "evaluated" in metrics:
        if EVALUATION not in privacy.disclose:
            own = [name.removesuffix("/mean") for name in metrics if name.startswith(OWN) and name.endswith("/mean")]
            names += [EVALUATION, *(_ACCURACIES if "accuracy/mean" in metrics else _LOSSES)]
            names += [f"{name}/{of}" for name in own for of in SUMMARIES]
        names += ["improved"] if "train" in spec.evaluated else []
    return tuple(name for name in names if name not in metrics)


def concealed(run: Run) -> bool:
    """True if the replies of a run are hidden from operators, since noise protects the clients.

    Simulated clients need no protection from the researcher who simulates them.
    """
    return parsed_spec(run.spec).privacy.client_noise > 0 and run.submitted_by != SIMULATOR


@lru_cache(maxsize=16)
def parsed_spec(document: bytes) -> RunSpec:
    """The specification of a run that was accepted."""
    return RunSpec.parse(document)
