"""Workers in containers with little shared memory, whose samples other processes read: they train without it."""

import json
import tempfile
from pathlib import Path

import pytest

from fedpareto.processes.forked import completed
from tests.harness import federation
from tests.paths import OWNERS_CODE, PROGRAMS

SMALL = [str(PROGRAMS / "small_container.py"), "200k"]
NOT_ALLOWED = 77
TASK = "normed_task:Normed"  # with these processes, the trainer's own cannot read its samples
READ = ["--set", "loader_workers=1", "--code", str(OWNERS_CODE)]
SENT = "send it through pipes instead"


@pytest.mark.full
def test_processes_send_samples_through_pipes_where_shared_memory_is_too_small() -> None:
    rehearsal = ["worker", "run", "--rehearse", "--task", TASK, "--json"]
    small = completed([*SMALL, *rehearsal, *READ])
    if small.returncode == NOT_ALLOWED:
        pytest.skip("this process may not mount a file system")
    assert small.stderr.count(SENT) == small.stderr.count("docker run --shm-size=1g") == 1, small.stderr
    alone = completed(["-m", "fedpareto", *rehearsal, "--code", str(OWNERS_CODE)])
    with_processes, without = (
        {
            name: value
            for name, value in json.loads(done.stdout).items()
            if "seconds" not in name and "memory" not in name
        }
        for done in (small, alone)
    )
    assert with_processes == without


@pytest.mark.full
def test_a_worker_with_little_shared_memory_trains_what_another_one_trains() -> None:
    spec = f'task = "{TASK}"\nrounds = 2\nparameters.buffers = "averaged"\ntrain = {{ steps = 3, batch_size = 200 }}\n'
    with tempfile.TemporaryDirectory() as directory, federation(Path(directory)) as fed:  # tmp_path is in /dev/shm
        fed.serve()
        fed.join("ann")
        models = set()
        for number, (program, options) in enumerate([(SMALL, READ), ((), READ[2:])]):
            worker = fed.work("ann", *options, task=TASK, program=program)
            if program and worker.popen.poll() == NOT_ALLOWED:
                pytest.skip("this process may not mount a file system")
            fed.attending("ann")
            models.add(fed.wait_completed(fed.submit(f"run-{number}", spec, "--code", str(OWNERS_CODE))))
            assert worker.text.count(SENT) == 1, worker.text
            fed.stop(worker)
    assert len(models) == 1
