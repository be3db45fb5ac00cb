"""Simulations by command: what they show, what is refused, and what is spread by Ray."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from coordinator.clock import utc_now
from coordinator.home import CoordinatorHome
from coordinator.settings import Settings
from federation.attacks.lone import SignFlip
from federation.digests import digest
from federation.tasks import initial_model, task
from federation.trust.keys import IdentityError
from federation.vectors import Layout, to_bytes, write_vectors
from fedpareto.face.simulated import simulate
from fedpareto.simulation import SimulationError
from fedpareto.simulation.simulate import Simulation
from storage.database import DatabaseBusy
from tests.command_lines import failure
from tests.fedpareto.simulation import scene as simulations
from tests.fedpareto.simulation.scene import OBJECTIVES, close, spec
from tests.fedpareto.sinks.scene import installed, rounds_in
from tests.harness import SECONDS, fedpareto
from tests.paths import ROOT

__all__ = ["installed"]

one_thread = simulations.one_thread  # a fixture


@pytest.mark.full
def test_the_command_simulates_shows_sends_and_resumes(tmp_path: Path, installed: Path) -> None:
    file, home, sent = tmp_path / "run.toml", tmp_path / "home", installed / "a.jsonl"
    file.write_text(spec())
    path = f"{ROOT}{os.pathsep}{installed / 'packages'}"
    words = (file, "--home", home, "--threads", "1", "--json", "--to", f"own:{sent}")
    document = json.loads(fedpareto("simulate", *words, PYTHONPATH=path).stdout)
    assert rounds_in(sent) == [0, 1, 2]
    assert sent.with_suffix(".end").read_text() == "COMPLETED model.safetensors card.md report.html"
    first = json.loads(sent.read_text().splitlines()[0])[1]
    assert first["accuracy/mean"] == document["rounds"][0]["accuracy/mean"]
    assert (document["state"], len(document["rounds"])) == ("COMPLETED", 3)
    assert "--resume" in fedpareto("simulate", file, "--home", home, code=2).stderr
    rounds = fedpareto("admin", "--home", home / "admin", "rounds", document["run_id"], "--json")
    assert [item["round"] for item in json.loads(rounds.stdout)["rounds"]] == [0, 1, 2]


@pytest.mark.full
def test_a_document_has_what_became_of_each_objective(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(OBJECTIVES.format(algorithm='name = "scalarised"', objectives="all"))
    done = fedpareto("simulate", file, "--home", tmp_path / "home", "--threads", "1", "--json")
    told = json.loads(done.stdout)["objectives"]
    assert [(item["round"], item["objective"]) for item in told] == [
        (t, name) for t in range(3) for name in ("left", "right")
    ]


@pytest.mark.full
def test_attackers_count_those_who_serve_the_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def on_update(self: SignFlip, own: np.ndarray, *, peers: np.ndarray, m: int, seed: int) -> np.ndarray:
        asked.append((len(peers), m))
        return -own

    monkeypatch.setattr(SignFlip, "on_update", on_update)
    text = OBJECTIVES.format(algorithm='name = "fsmgda"', objectives="all").replace("count = 4", "count = 6")
    text = text.replace("over_selection = 1.5\n", "").replace("rounds = 3", "rounds = 1")
    few = "\n".join(f"client-{number:03d} = ['right']" for number in range(3))
    simulate(f'{text}attackers = 1\nattack = "sign-flip"\n[objectives.serve]\n{few}\n')
    assert sorted(asked) == [(2, 3), (5, 6)]  # the honest ones who serve it, and the attacker with them


@pytest.mark.parametrize(
    ("change", "options", "code", "words"),
    [
        (("digits", "digitz"), [], 2, "no task 'digitz'; there are adult"),
        (("digits", "mnist"), [], 1, "mnist needs a directory: --data DIR"),
        (("shards:2", "natural"), [], 1, "this data has no natural owners: use iid"),
        (("shards:2", "slices"), [], 2, "run.toml: simulation.partition: unknown scheme 'slices'"),
        (("clients = 4", "clients = 4000"), [], 1, "1797 samples cannot be cut into 8000 pieces"),
        (("[simulation]", "minimum = 9\n[simulation]"), [], 2, "4 clients with data, but a round needs 9"),
        (("", ""), ["--backend", "abacus"], 2, "no backend 'abacus': there are auto, stacked, loop, compiled, ray"),
        (("= 20", "= 0"), ["--backend", "compiled"], 2, "digits cannot be trained compiled: a step on a whole split"),
        (("", ""), ["--ray-address", "far:6379"], 2, "(far:6379) goes with the backend ray, not with auto"),
        (("", ""), ["--device", "tpu"], 2, "no device 'tpu'"),
        (("", ""), ["--model", "run.toml"], 2, "run.toml cannot be the initial model: it is a text"),
        (("", ""), ["--resume"], 2, "home holds no simulation to resume"),
    ],
)
def test_a_simulation_that_cannot_be_says_why_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str], options: list[str], code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(spec().replace(*change, 1))
    result = failure("simulate", "run.toml", "--home", "home", *options)
    assert (result.code, words in result.message) == (code, True), result.message
    assert not Path("home").exists()


def test_a_simulation_that_fails_tells_why_its_updates_were_not_accepted(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(spec().replace("learning_rate = 0.1", "learning_rate = 1e30"))
    done = fedpareto("simulate", tmp_path / "run.toml", "--home", tmp_path / "some [where]", code=1)
    said = " ".join(done.stdout.split())
    assert "replies not accepted, training-diverged: training diverged at step" in said
    assert f"--home '{tmp_path}/some [where]/admin' rounds" in said
    assert "the run ended FAILED" in done.stderr


def test_a_directory_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SimulationError, match="holds other things: name a new directory"):
        Simulation(spec().encode(), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"spec": ["x"]}, TypeError, "a TOML text or the path of one is needed, or a dict or RunSpec, not list"),
        ({"resume": True}, ValueError, "which simulation"),
        ({"threads": 0}, ValueError, "at least 1; got 0"),
        ({"model": {}}, TypeError, "the path of a safetensors file is needed, not dict"),
    ],
)
def test_a_call_that_makes_no_sense_says_so(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        simulate(**({"spec": spec()} | arguments))


def test_a_simulation_begins_with_the_model_of_a_file_and_says_what_it_took(tmp_path: Path) -> None:
    layout, vector = initial_model(task("digits"), 8)
    save_file({name: values.astype(np.float16) for name, values in layout.split(vector).items()}, tmp_path / "half")
    text, home = spec(rounds=1) + "[parameters]\npersonal = ['out.*']\n", tmp_path / "home"
    history = simulate(text, home=home, model=tmp_path / "half")
    assert [warning.partition(":")[2].split(",")[0] for warning in history.warnings] == [
        " 2 tensors of float16 became float32",
        " 2 personal parameters left out",
    ]
    shared = Layout(layout.tensors[:2])
    begun = to_bytes(shared, vector[: shared.size].astype(np.float16).astype(np.float32))
    kind, _, value = digest(begun).partition(":")
    assert (home / "blobs" / kind / value[:2] / value[2:]).read_bytes() == begun
    assert simulate(text, home=home, resume=True).warnings == history.warnings[2:]
    write_vectors(tmp_path / "other", shared, vector[: shared.size])
    with pytest.raises(SimulationError, match=r"began with another model than .*other: resume it without a model"):
        simulate(text, home=home, resume=True, model=tmp_path / "other")


def test_homes_that_are_taken_damaged_or_no_simulations_are_told_apart(tmp_path: Path) -> None:
    text, home = spec(rounds=1).encode(), tmp_path / "home"
    with Simulation(text, home) as simulation:
        simulation.run()
        with pytest.raises(DatabaseBusy):
            Simulation(text, home, resume=True)
    with pytest.raises(SimulationError, match=r"home is taken: .*--resume.*--home"):
        Simulation(text, home)
    with Simulation(text, home, resume=True) as simulation:
        assert (simulation.done, simulation.run().state) == (1, "COMPLETED")
    (home / "signing.key").unlink()
    with pytest.raises(IdentityError, match=r"signing\.key"):
        Simulation(text, home, resume=True)
    CoordinatorHome.init(tmp_path / "real", Settings(federation_id="real"), now=utc_now())
    with pytest.raises(SimulationError, match="home of the federation real, not of a simulation"):
        Simulation(text, tmp_path / "real", resume=True)


@pytest.mark.full
def test_a_simulation_that_was_killed_before_it_began_begins_when_it_is_resumed(tmp_path: Path) -> None:
    CoordinatorHome.init(tmp_path / "home", Settings(federation_id="simulation"), now=utc_now())
    assert simulate(spec(rounds=1), home=tmp_path / "home", resume=True).state == "COMPLETED"


@pytest.mark.full
def test_the_success_of_a_backdoor_is_measured() -> None:
    text = spec(clients=5, attackers=2, attack="backdoor:target=3", algorithm="fedavg", partition="iid", rounds=8)
    rates = simulate(text).rounds["backdoor"].tolist()
    assert len(rates) == 8
    assert all(0 <= rate <= 1 for rate in rates)
    assert rates[-1] > 0.8  # plain averaging lets it in
    assert "backdoor" not in simulate(spec(rounds=1)).rounds


def ray_starts_by_itself() -> bool:
    """Where it does, a simulation that cannot start it is at fault."""
    program = "import ray; ray.init(num_cpus=1, include_dashboard=False)"
    alone = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.run([sys.executable, "-c", program], env=alone, timeout=SECONDS, check=False).returncode == 0


@pytest.mark.full
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed here")
def test_clients_spread_by_ray_do_what_others_do_until_ctrl_c_ends_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "own_digits.py").write_text("from federation.tasks.digits import Digits\n\n\nclass Own(Digits): ...\n")
    monkeypatch.syspath_prepend(code)  # for the simulations in this process
    text = spec(fraction=0.5, rounds=30).replace('task = "digits"', 'task = "own_digits:Own"')
    file, home = tmp_path / "run.toml", tmp_path / "home"
    file.write_text(text)
    command = [sys.executable, "-u", "-m", "fedpareto", "simulate", str(file), "--home", str(home), "--code", str(code)]
    with subprocess.Popen(
        [*command, "--backend", "ray", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as simulating:
        assert simulating.stdout is not None
        told = [simulating.stdout.readline()]
        while told[-1] and not told[-1].startswith("    10 "):
            told.append(simulating.stdout.readline())
        started = psutil.Process(simulating.pid).children(recursive=True) if told[-1] else []
        names = {process.name() for process in started}
        if told[-1]:
            os.killpg(simulating.pid, signal.SIGINT)  # as a terminal sends it: to all of them
        _, said = simulating.communicate(timeout=SECONDS)
    if "Ray does not start" in said and not ray_starts_by_itself():
        pytest.skip(f"Ray starts here for no program at all: {said}")
    assert (simulating.returncode, "--resume goes on" in said) == (130, True), said
    assert "raylet" in names
    _, left = psutil.wait_procs(started, timeout=SECONDS)
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]

    whole, resumed = simulate(text, backend="loop"), simulate(text, home=home, backend="loop", resume=True)
    assert resumed.state == "COMPLETED"
    assert resumed.replies["client"].tolist() == whole.replies["client"].tolist()
    close(resumed.model, whole.model)
