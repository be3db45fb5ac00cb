"""The facts of a specification that every assignment of its run repeats."""

from federation.digests import digest
from federation.spec.run_spec import RunSpec
from federation.spec.sharing import Chosen
from federation.v1.common_pb2 import UnsharedParameters


def unshared_parameters(chosen: Chosen) -> UnsharedParameters:
    """The message about unshared parameters; empty if the run shares all."""
    return UnsharedParameters(
        personal=chosen.personal,
        frozen=chosen.frozen,
        buffers=chosen.buffers,
        fixed=chosen.fixed,
        statistics=chosen.statistics,
    )


def run_facts(federation_id: str, run_id: str, document: bytes, spec: RunSpec) -> dict[str, object]:
    """The values that all assignments of a run repeat, by the name of the field; `spec` is the parsed document."""
    return {
        "federation_id": federation_id,
        "run_id": run_id,
        "spec": digest(document),
        "task": spec.task,
        "seed": spec.seed,
        "unshared": unshared_parameters(spec.parameters),
    }
