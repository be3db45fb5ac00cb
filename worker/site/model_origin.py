"""Where the initial model of a run comes from: its task and its seed, or the administrator who submitted it."""

from dataclasses import dataclass
from typing import Literal

from federation.digests import hasher, parse
from federation.spec.run_spec import RunSpec, SpecError
from federation.spec.sharing import SharingError
from federation.statistics.scale import ScaleError
from federation.tasks import TaskError, task
from federation.training.own import run_model
from worker.site.run_requests import RunRequest


@dataclass(frozen=True)
class ModelOrigin:
    """Where the initial model of a run comes from.

    Attributes:
        source: "task" if the task makes it from the seed of the run; "submitter" if the task makes another one;
            "unknown" if the task's model cannot be made here.
        message: the same for people.
    """

    source: Literal["task", "submitter", "unknown"]
    message: str


def model_origin(run: RunRequest) -> ModelOrigin:
    """Makes the initial model of a run from its task, its seed and its result of statistics; compares the digests.

    It imports the code of the task, under the name by which this site's owner has offered it.
    """
    try:
        spec = RunSpec.parse(run.document)
        # Section 7: the model of another task would be compared with this one, and differ for a reason that says
        # nothing.
        if spec.task != run.task:
            return _unknown(f"the specification is for the task {spec.task}, the run for {run.task}")
        if spec.measures:
            return ModelOrigin("submitter", "given by the submitter, as all models that the run measures")
        named = spec.parameters.statistics
        if named and not run.statistics:
            return _unknown(f"the result {named}, from which it is filled, is not here; your worker checks that part")
        layout, vector = run_model(task(run.task), spec.seed, spec.parameters, run.statistics)
    except ModuleNotFoundError as error:
        return _unknown(f"the model of {run.task} is made with {error.name}, which is not installed here")
    except (SpecError, TaskError, SharingError, ScaleError) as error:
        return _unknown(str(error))
    algorithm, value = parse(run.initial_model)
    state = hasher(algorithm)
    # Section 7: header and values, as the file has them: the digest is of the file.
    state.update(layout.header)
    state.update(vector.data.cast("B"))
    if state.hexdigest() == value:
        filled = f", filled from the result {named}" if named else ""
        return ModelOrigin("task", f"from task and seed{filled}, checked")
    return ModelOrigin(
        "submitter",
        f"given by the submitter: the task {run.task}, as it is installed here, makes another model from the seed "
        f"{spec.seed}. A model can be made so that updates from it show more of the data: ask the submitter where it "
        "comes from before you approve the run",
    )


def _unknown(why: str) -> ModelOrigin:
    return ModelOrigin("unknown", f"not checked, as this machine cannot make the model from task and seed: {why}")
