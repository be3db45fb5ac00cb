"""The name of the model that a run starts from."""

import pytest

from federation.digests import digest
from tests.harness import SECONDS, refused
from tests.stage import MODEL, Stage, spec, submission


@pytest.mark.parametrize("name", [digest(MODEL, "sha256"), digest(MODEL).upper()])
def test_a_model_is_submitted_under_its_only_name(stage: Stage, name: str) -> None:
    task = stage.task()
    stage.cast(task, "ann")
    requests = submission(spec("named", task, algorithm="fedavg"), MODEL, paused=True)
    requests[0].header.model = name
    with refused("INVALID_ARGUMENT", "argument") as words:
        stage._admin.SubmitRun(iter(requests), timeout=SECONDS)
    assert words[0].startswith("model: ")
