"""Simulated clients: the same numbers as real ones, stacked or one by one; stopped and resumed; attacked."""

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
import torch
from forked import completed
from harness import SECONDS, federation
from typer.testing import CliRunner

from coordinator.clock import utc_now
from coordinator.home import Home
from coordinator.services import views
from coordinator.services.verification import Verifier
from coordinator.settings import Settings
from federation.attacks.lone import SignFlip
from federation.keys import IdentityError
from federation.runs import SpecError
from federation.tasks import task
from federation.v1.admin_pb2 import Update
from federation.vectors import read_vector
from federation.work.computation import LocalSgd
from fedpareto.cli.failure import Failure
from fedpareto.cli.main import app
from fedpareto.notebook import simulate
from simulation import SimulationError
from simulation.compiled import must_compile, why_not_compiled
from simulation.simulate import Progress, Simulation
from storage.database import DatabaseBusy
from storage.models import Run, RunState

SPEC = """
name = "small"
task = "digits"
rounds = {rounds}
seed = 5

[algorithm]
name = "{algorithm}"

[train]
batch_size = 20
learning_rate = 0.1

[evaluate]
every = {every}

[selection]
method = "fraction"
fraction = {fraction}

[simulation]
clients = {clients}
partition = "{partition}"
attackers = {attackers}
attack = "{attack}"
"""


def spec(**values: object) -> str:
    chosen = {
        "rounds": 3,
        "algorithm": "fedmgda+",
        "every": 1,
        "fraction": 1.0,
        "clients": 4,
        "partition": "shards:2",
        "attackers": 0,
        "attack": "",
    }
    return SPEC.format(**(chosen | values))


def run_cli(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return completed(["-m", "fedpareto", *arguments])


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Models as small as these only wait for each other's threads."""
    torch.set_num_threads(1)


def close(found: np.ndarray, expected: np.ndarray) -> None:
    # Rounding of sums in another order, carried through some dozen steps.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))


def test_a_simulation_is_the_real_federation_to_the_last_digits_of_float32(tmp_path: Path) -> None:
    text = spec(fraction=0.6, clients=3, rounds=3)
    names = [f"client-{number:03d}" for number in range(3)]
    with federation(tmp_path) as real:
        real.serve()
        for number, name in enumerate(names):
            real.join(name)
            real.work(name, "--task", "digits", "--part", f"{number + 1}/3", "--partition", "shards:2")
        real.attending(*names)
        digest = real.wait_completed(real.submit("small", text.replace('name = "small"\n', "", 1)))
        selected = [json.loads(row[0]) for row in real.query("SELECT selected FROM rounds ORDER BY number")]
        losses = {
            (number, client): json.loads(told)["loss"]
            for number, client, told in real.query(
                "SELECT r.number, u.client_id, u.losses FROM updates u JOIN assignments USING (assignment_id) "
                "JOIN phases p USING (phase_id) JOIN rounds r USING (round_id) WHERE p.kind = 'train'"
            )
        }
        accuracy = [
            json.loads(row[0])["accuracy/mean"] for row in real.query("SELECT metrics FROM rounds ORDER BY number")
        ]
        kind, _, value = digest.partition(":")
        model = read_vector(real.home / "blobs" / kind / value[:2] / value[2:])[1]
    for backend in ("loop", "stacked"):
        history = simulate(text, backend=backend)
        close(history.model, model)
        asked = history.updates.groupby("round")["client"].apply(list).tolist()
        assert asked == selected
        for record in history.update_records:
            assert record["loss"] == pytest.approx(losses[record["round"], record["client"]], rel=1e-4)
        assert history.rounds["accuracy/mean"].tolist() == pytest.approx(accuracy, abs=0.02)


@pytest.mark.parametrize("attack", ["", "sign-flip", "alie", "label-flip", "free-rider", "scale=10,bias=5"])
def test_stacked_clients_do_what_single_ones_do(attack: str) -> None:
    text = spec(clients=6, attackers=2 if attack else 0, attack=attack, partition="iid", every=3)
    one, all_at_once = (simulate(text, backend=backend) for backend in ("loop", "stacked"))
    close(all_at_once.model, one.model)
    assert one.attackers == (("client-004", "client-005") if attack else ())
    assert [record["accepted"] for record in all_at_once.update_records] == [True] * 18


def test_momentum_decay_and_proximity_are_stacked_too() -> None:
    more = "momentum = 0.9\nweight_decay = 0.01\nproximal_mu = 0.1\n"
    text = spec(clients=3).replace("[train]\n", f"[train]\n{more}")
    one, all_at_once = (simulate(text, backend=backend) for backend in ("loop", "stacked"))
    close(all_at_once.model, one.model)


@pytest.fixture
def compiler() -> None:
    """A C++ compiler, and what it needs of Python; skips where there is none."""
    try:
        must_compile()
    except SimulationError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("compiler")
def test_compiled_steps_come_to_what_a_loop_comes_to() -> None:
    more = "momentum = 0.9\nweight_decay = 0.01\nproximal_mu = 0.1\n"
    text = spec(clients=3, partition="dirichlet:0.5", rounds=2).replace("[train]\n", f"[train]\n{more}")
    one, compiled = (simulate(text, backend=backend) for backend in ("loop", "compiled"))
    close(compiled.model, one.model)
    assert compiled.rounds["accuracy/mean"].tolist() == pytest.approx(one.rounds["accuracy/mean"].tolist(), abs=0.02)


@pytest.mark.usefixtures("compiler")
def test_a_compiled_client_that_diverges_says_at_which_step() -> None:
    history = simulate(spec(rounds=1).replace("learning_rate = 0.1", "learning_rate = 1e30"), backend="compiled")
    told = [(record["accepted"], record["reason"]) for record in history.update_records]
    assert told == [(False, "training-diverged")] * 4


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("digits", ""),
        ("fashion-mnist", "dropout would draw other numbers than a worker's"),
        ("mnist-fashion", "it has several objectives"),
        ("shakespeare", "recurrent layers cannot be compiled"),
    ],
)
def test_what_would_draw_other_numbers_is_not_compiled(name: str, why: str) -> None:
    assert why_not_compiled(task(name), LocalSgd(epochs=1, batch_size=10, learning_rate=0.1)) == why


def test_without_a_compiler_the_backend_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(spec())
    around = os.environ | {"CXX": "no-such-compiler"}
    done = completed(["-m", "fedpareto", "simulate", "run.toml", "--backend", "compiled"], cwd=tmp_path, env=around)
    assert done.returncode == 2
    assert "the backend compiled needs a C++ compiler that works (" in done.stderr.replace("\n", " ")
    assert done.stderr.strip().endswith("install one, or use --backend loop")


def test_a_model_without_a_finite_loss_improved_nobody() -> None:
    text = spec(rounds=1, algorithm="fedavg").replace("every = 1", 'every = 1\nsplits = ["train", "test"]')
    history = simulate(text + "\n[server]\nlearning_rate = 1e30\n")
    assert history.rounds["improved"].tolist() == [0.0]
    assert "loss/train" not in history.rounds


def test_a_rule_that_evaluates_another_model_than_it_trains_from_tells_nothing_of_improvement() -> None:
    text = spec(rounds=1, algorithm="afl").replace("every = 1", 'every = 1\nsplits = ["train", "test"]')
    history = simulate(text)
    assert "improved" not in history.rounds
    assert "improved" in simulate(text.replace('"afl"', '"fedavg"')).rounds


def test_refused_updates_are_recorded_as_the_coordinator_would(tmp_path: Path) -> None:
    history = simulate(spec(attackers=1, attack="nan", rounds=2))
    refused = [record for record in history.update_records if not record["accepted"]]
    assert [(record["client"], record["reason"]) for record in refused] == [("client-003", "non-finite")] * 2
    assert history.state == "COMPLETED"


@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_a_round_may_ask_none_but_attackers_that_do_not_train(backend: str) -> None:
    history = simulate(spec(attackers=4, attack="free-rider", algorithm="fedavg"), backend=backend)
    assert history.state == "COMPLETED"


def test_the_same_specification_gives_the_same_bytes(tmp_path: Path) -> None:
    text = spec(fraction=0.5, algorithm="fedavg")
    first, second = simulate(text), simulate(text)
    assert first.model.tobytes() == second.model.tobytes()
    assert first.client_records == second.client_records


def test_fedmgda_plus_makes_the_same_bytes_of_an_update_that_is_scaled_by_a_power_of_two() -> None:
    def model(algorithm: str, scale: int) -> bytes:
        text = spec(algorithm=algorithm, attackers=1, attack=f"scale={scale}")
        return bytes(simulate(text, threads=1).model.tobytes())

    assert model("fedmgda+", 8) == model("fedmgda+", 1)
    assert model("fedavg", 8) != model("fedavg", 1)


def test_a_simulation_that_was_stopped_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    text = spec(rounds=5).encode()
    whole = simulate(text)
    with Simulation(text, tmp_path / "home") as simulation:

        def stop(progress: Progress) -> None:
            if progress.done == 2:
                simulation.stop()

        half = simulation.run(stop)
    assert half.state == "PAUSED"
    assert len(half.round_records) >= 2
    with Simulation(text, tmp_path / "home", resume=True) as simulation:
        rest = simulation.run()
    assert (rest.state, len(rest.round_records)) == ("COMPLETED", 5)
    assert rest.model.tobytes() == whole.model.tobytes()
    with pytest.raises(SimulationError, match="another specification"):
        Simulation(spec(rounds=6).encode(), tmp_path / "home", resume=True)


def test_a_look_into_the_record_of_a_killed_simulation_changes_nothing_that_follows(tmp_path: Path) -> None:
    text, home = spec(rounds=4).encode(), tmp_path / "home"
    whole = simulate(text)
    with Simulation(text, home) as simulation:
        simulation.run(lambda progress: simulation.stop())
        with simulation._database.begin() as session:  # as kill -9 leaves it, in the middle of a round
            session.get_one(Run, simulation.run_id).state = RunState.RUNNING
    shown = run_cli("admin", "--home", str(home / "admin"), "round", simulation.run_id, "-1", "--json")
    assert shown.returncode == 0, shown.stderr  # the coordinator behind it may have begun to ask somebody
    seen = json.loads(shown.stdout)["run"]
    assert (seen["state"], seen["reason"]) == ("PAUSED", "interrupted; fedpareto simulate --resume goes on")
    rest = simulate(text, home=home, resume=True)
    assert rest.model.tobytes() == whole.model.tobytes()
    assert rest.updates.equals(whole.updates)


def test_a_simulation_that_a_second_interrupt_ends_at_once_is_paused_in_its_record(tmp_path: Path) -> None:
    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    with Simulation(spec(rounds=3).encode(), tmp_path / "home") as simulation:
        with pytest.raises(KeyboardInterrupt):
            simulation.run(interrupt)
        with simulation._database.read() as session:
            run = session.get_one(Run, simulation.run_id)
    assert (run.state, run.reason) == (RunState.PAUSED, "interrupted; fedpareto simulate --resume goes on")
    assert simulate(spec(rounds=3), home=tmp_path / "home", resume=True).state == "COMPLETED"


def test_a_long_record_of_updates_is_read_a_piece_at_a_time(tmp_path: Path) -> None:
    with Simulation(spec(rounds=5, algorithm="fedavg").encode(), tmp_path / "home") as simulation:
        simulation.run()
        with simulation._database.read() as session:
            key = simulation._home.signing_key.public_key()
            verifier = Verifier(simulation._home.federation_id, key)
            whole, _ = views.updates(session, verifier, simulation.run_id, None, "", 0, 1000)
            pieces: list[Update] = []
            after = 0
            while (found := views.updates(session, verifier, simulation.run_id, None, "", after, 3))[0]:
                pieces.extend(found[0])
                after = found[1]
            own, _ = views.updates(session, verifier, simulation.run_id, 2, "client-001", 0, 3)
    assert [(update.round, update.client_id) for update in whole] == [
        (t, f"client-{i:03d}") for t in range(5) for i in range(4)
    ]
    assert pieces == whole
    assert [(update.round, update.client_id) for update in own] == [(2, "client-001")]


def test_models_of_past_rounds_do_not_pile_up(tmp_path: Path) -> None:
    with Simulation(spec(rounds=8, every=0).encode(), tmp_path / "home") as simulation:
        simulation.run()
    blobs = [path for path in (tmp_path / "home" / "blobs").glob("*/??/*") if path.stat().st_size > 10_000]
    assert len(blobs) <= 7  # before and after the first, the best and the last two rounds


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attack": "sign-flip"}, "both or neither"),
        ({"attackers": 9, "attack": "sign-flip"}, "9 attackers among 4"),
        ({"clients": 0}, "simulation.clients"),
    ],
)
def test_a_population_that_makes_no_sense_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        simulate(spec(**change))


def test_the_command_simulates_shows_and_resumes(tmp_path: Path) -> None:
    file, home = tmp_path / "run.toml", tmp_path / "home"
    file.write_text(spec())
    done = run_cli("simulate", str(file), "--home", str(home), "--threads", "1", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["state"], len(document["rounds"])) == ("COMPLETED", 3)
    again = run_cli("simulate", str(file), "--home", str(home))
    assert again.returncode == 2
    assert "--resume" in again.stderr
    rounds = run_cli("admin", "--home", str(home / "admin"), "rounds", document["run_id"], "--json")
    assert rounds.returncode == 0, rounds.stderr
    assert [item["round"] for item in json.loads(rounds.stdout)["rounds"]] == [0, 1, 2]


def test_a_document_has_what_became_of_each_objective(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(OBJECTIVES.format(algorithm='name = "scalarised"', objectives="all"))
    done = run_cli("simulate", str(file), "--home", str(tmp_path / "home"), "--threads", "1", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["objectives"]
    assert [(item["round"], item["objective"]) for item in told] == [
        (t, name) for t in range(3) for name in ("left", "right")
    ]


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
        (("", ""), ["--resume"], 2, "home holds no simulation to resume"),
    ],
)
def test_a_simulation_that_cannot_be_says_why_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str], options: list[str], code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(spec().replace(*change, 1))
    result = CliRunner().invoke(app, ["simulate", "run.toml", "--home", "home", *options])
    assert isinstance(result.exception, Failure), result.output
    assert (result.exception.code, words in result.exception.message) == (code, True), result.exception.message
    assert not Path("home").exists()


def test_a_simulation_that_fails_tells_why_its_updates_were_not_accepted(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(spec().replace("learning_rate = 0.1", "learning_rate = 1e30"))
    done = run_cli("simulate", str(tmp_path / "run.toml"), "--home", str(tmp_path / "some [where]"))
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert "updates not accepted, training-diverged: training diverged at step" in said
    assert f"--home '{tmp_path}/some [where]/admin' rounds" in said
    assert "the run ended FAILED" in done.stderr


def test_a_directory_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SimulationError, match="holds other things: name a new directory"):
        Simulation(spec().encode(), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"spec": {"name": "x"}}, TypeError, "a TOML text or the path of one is needed, not dict"),
        ({"resume": True}, ValueError, "which simulation"),
        ({"threads": 0}, ValueError, "at least 1; got 0"),
    ],
)
def test_a_call_that_makes_no_sense_says_so(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        simulate(**({"spec": spec()} | arguments))


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
    Home.init(tmp_path / "real", Settings(federation_id="real"), now=utc_now())
    with pytest.raises(SimulationError, match="home of the federation real, not of a simulation"):
        Simulation(text, tmp_path / "real", resume=True)


def test_a_simulation_that_was_killed_before_it_began_begins_when_it_is_resumed(tmp_path: Path) -> None:
    Home.init(tmp_path / "home", Settings(federation_id="simulation"), now=utc_now())
    assert simulate(spec(rounds=1), home=tmp_path / "home", resume=True).state == "COMPLETED"


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
    assert resumed.updates["client"].tolist() == whole.updates["client"].tolist()
    close(resumed.model, whole.model)


def test_with_over_selection_a_round_takes_as_many_replies_as_it_wants() -> None:
    text = spec(clients=6, fraction=0.5, rounds=2).replace("[simulation]", "over_selection = 2.0\n\n[simulation]")
    history = simulate(text)
    for _, asked in history.updates.groupby("round"):
        assert len(asked) == 6
        assert asked["accepted"].sum() == 3
        assert set(asked[~asked["accepted"]]["reason"]) == {"not-needed"}


def test_without_measuring_the_model_is_the_same_and_losses_before_a_step_are_unknown() -> None:
    measured = simulate(spec())
    bare = simulate(spec().replace("[train]", "[train]\nmeasure = false"))
    np.testing.assert_array_equal(bare.model, measured.model)
    assert measured.rounds["improved"].notna().all()
    assert "improved" not in bare.rounds
    assert measured.updates["loss"].notna().all()
    assert bare.updates["loss"].isna().all()


@pytest.mark.parametrize("algorithm", ["q-fedavg", "fedfa"])
def test_a_rule_that_needs_measurements_cannot_do_without(algorithm: str) -> None:
    with pytest.raises(SpecError, match=f"train.measure: {algorithm} needs what clients measure"):
        simulate(spec(algorithm=algorithm).replace("[train]", "[train]\nmeasure = false"))


OBJECTIVES = """
name = "objectives"
task = "two-digits"
rounds = 3
seed = 5

[algorithm]
{algorithm}

[train]
steps = 3
batch_size = 20

[selection]
method = "count"
count = 4
over_selection = 1.5

[evaluate]
every = 0

[simulation]
clients = 6
objectives = "{objectives}"
"""


def test_objectives_that_a_task_does_not_have_are_named() -> None:
    text = OBJECTIVES.format(algorithm='name = "fedcmoo"', objectives="all")
    for names, words in (
        ('["left", "up"]', "left, up are not those of two-digits, which has left, right"),
        ('["left"]', "left are not those of two-digits"),
        ('["left", "left"]', "each once"),
    ):
        with pytest.raises(SpecError, match=words):
            simulate(f"{text}\n[objectives]\nnames = {names}\n")
    with pytest.raises(SpecError, match=r"objectives\.serve\.client-000: no objective 'up'"):
        simulate(f"{text}\n[objectives.serve]\nclient-000 = ['up']\n")


@pytest.mark.parametrize(
    ("algorithm", "objectives"),
    [
        ('name = "fedcmoo"\nunbiased = true', "cycle:1"),
        ('name = "fedcmoo"\nsketch = "svd-two-way"\nlatecomers = true', "all"),
        ('name = "fedcmoo-pref"\nsketch = "exact"', "all"),
        ('name = "fsmgda"', "cycle:1"),
    ],
)
def test_rounds_over_objectives_may_be_stacked_and_are_resumed_to_the_same_bytes(
    tmp_path: Path, algorithm: str, objectives: str
) -> None:
    text = OBJECTIVES.format(algorithm=algorithm, objectives=objectives)
    one, all_at_once = (simulate(text, backend=backend) for backend in ("loop", "stacked"))
    close(all_at_once.model, one.model)
    with Simulation(text.encode(), tmp_path / "home", backend="loop") as simulation:
        assert simulation.run(lambda progress: simulation.stop()).state == "PAUSED"
    rest = simulate(text, home=tmp_path / "home", backend="loop", resume=True)
    assert (rest.state, rest.model.tobytes()) == ("COMPLETED", one.model.tobytes())


@pytest.mark.parametrize(
    ("sketch", "attack", "reason"), [("count", "nan", "failed"), ("svd-two-way", "scale=1e30", "limit:norm")]
)
def test_gradients_that_no_sketch_can_hold_end_no_simulation(sketch: str, attack: str, reason: str) -> None:
    text = OBJECTIVES.format(algorithm=f'name = "fedcmoo"\nsketch = "{sketch}"', objectives="all")
    text = text.replace('method = "count"\ncount = 4\nover_selection = 1.5', "quorum = 0.1")
    history = simulate(text + f'attackers = 2\nattack = "{attack}"\n')
    assert history.state == "COMPLETED", history.reason
    assert history.round_records[0]["state"] == "COMPLETED"
    assert reason in {record["reason"] for record in history.update_records}
