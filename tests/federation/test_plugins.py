"""Plug-ins: found by name or as module:Class, listed, and refused in words that say what is wrong."""

import json
import shutil
import sys
from collections.abc import Iterator
from importlib import invalidate_caches
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from coordinator.rounds.runs.specification import parse_run
from federation.aggregation.registry import algorithm, origins
from federation.attacks import AttackError, parse_attack
from federation.attacks.catalogue import entries
from federation.digests import digest
from federation.plugins import CodeOrigin, PluginError, Plugins
from federation.sketches import SKETCHES, sketch
from federation.sketches import load as load_sketch
from federation.sketches.base import SketchError
from federation.tasks import task
from federation.training.torch_trainer import TorchTrainer
from federation.training.trainers import trainer_kind
from federation.transport.channels import refusal_from_rpc_error
from fedpareto.cli import completion
from fedpareto.experiments.definition import ExperimentError
from fedpareto.experiments.loading import load as load_experiment
from fedpareto.offline_aggregation import HyperparameterError, aggregate
from fedpareto.processes.forked import completed
from storage.states import RunState
from tests.paths import EXAMPLES
from tests.stage import Stage, spec

HEAD = "from dataclasses import dataclass\nfrom fedpareto import Rule, conclude, option\n"
MEAN = (
    "@dataclass(frozen=True, kw_only=True)\n"
    "class Mean(Rule):\n"
    "    '''The mean.'''\n"
    "    FIELD\n"
    "    def combine(self, rows):\n"
    "        return conclude(rows.gram, rows.prior, rows.prior)\n"
)
ENTRY_POINTS = """
[fedpareto.rules]
worst-first = worst_first:WorstFirst
fedavg = worst_first:WorstFirst
broken-rule = not_there:Rule

[fedpareto.stages]
equal-length = equal_length:EqualLength

[fedpareto.attacks]
backwards = backwards:Backwards
broken-attack = not_there:Attack

[fedpareto.sketches]
random-signs = random_signs:RandomSigns
count = random_signs:RandomSigns

[fedpareto.trainers]
newton = scikit:Newton
torch = scikit:Newton

[fedpareto.tasks]
tumours = clinic:Tumours

[fedpareto.experiments]
my-experiment = own_experiments
broken-experiment = own_experiments
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on Python's path; what is imported from it is forgotten afterwards."""
    known = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), str(EXAMPLES)])
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith((str(tmp_path), str(EXAMPLES))):
            del sys.modules[name]


@pytest.fixture
def packages(code: Path) -> Path:
    """Entry points of every kind, in a directory as `--code` takes it."""
    info = code / "example.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (code / "own_experiments").mkdir()
    (code / "own_experiments" / "__init__.py").touch()
    shutil.copy(EXAMPLES / "my-experiment.toml", code / "own_experiments")
    return code


def rule(code: Path, text: str, name: str = "made") -> str:
    (code / f"{name}.py").write_text(HEAD + text)
    return f"{name}:Mean"


# ---- found


def test_a_rule_of_ones_own_takes_hyperparameters_and_bears_the_name_that_it_was_asked_by(code: Path) -> None:
    found = algorithm("worst_first:WorstFirst", {"share": 1})
    assert (found.name, found.share) == ("worst_first:WorstFirst", 1.0)  # type: ignore[attr-defined]
    U, losses = np.diag([1.0, 2.0, 3.0, 4.0]), [4.0, 1.0, 3.0, 2.0]
    result = aggregate("worst_first:WorstFirst", U, losses=losses, pre=["equal_length:EqualLength"])
    np.testing.assert_allclose(result.direction, [1.25, 0, 1.25, 0])
    np.testing.assert_allclose(result.weights, [0.5, 0, 0.5, 0])
    with pytest.raises(HyperparameterError, match=r"^share must lie in \(0, 1\]; got 2\.0"):
        algorithm("worst_first:WorstFirst", {"share": 2})


def test_entry_points_give_short_names_and_take_none_that_is_built_in(packages: Path) -> None:
    assert algorithm("worst-first").name == "worst-first"
    assert type(algorithm("fedavg")).__name__ == "FedAvg"
    assert algorithm("fedavg", {"pre": ["equal-length"]}).stages[0].name == "equal-length"
    assert str(parse_attack("backwards:factor=3")) == "backwards:factor=3"
    assert type(sketch("random-signs", d=8, objectives=("a",))).__name__ == "RandomSigns"
    assert type(sketch("count", d=8, objectives=("a",))) is SKETCHES["count"]
    assert trainer_kind(task("digits"), "newton").__name__ == "Newton"
    assert trainer_kind(task("digits"), "torch") is TorchTrainer
    assert load_experiment("my-experiment").title == "FedMGDA+ beside FedAvg, four members"


def test_an_attack_of_ones_own_is_written_with_its_options_after_a_second_colon(code: Path) -> None:
    for text in ("backwards:Backwards", "backwards:Backwards:factor=3"):
        attack = parse_attack(text)
        assert (str(attack), attack) == (text, parse_attack(str(attack)))
    own = np.arange(4, dtype=np.float32)
    sent = parse_attack("backwards:Backwards:factor=3").on_update(own, peers=own[None], m=1, seed=0)
    assert sent.tolist() == [9.0, 6.0, 3.0, 0.0]
    with pytest.raises(AttackError, match=r"factor must lie in \[0, inf\); got -1"):
        parse_attack("backwards:Backwards:factor=-1")


def test_a_sketch_of_ones_own_estimates_without_bias(code: Path) -> None:
    A = np.random.default_rng(0).standard_normal((2, 40))
    kind = load_sketch("random_signs:RandomSigns")
    made = kind(d=40, objectives=("a", "b"), budget=1.0)
    estimates = []
    for seed in range(400):
        rows = made.compress(A, shared_seed=seed, own_seed=0)
        vectors = made.vectors(rows, 2, shared_seed=seed)  # type: ignore[attr-defined]
        estimates.append(vectors @ vectors.T)
    np.testing.assert_allclose(np.mean(estimates, axis=0), A @ A.T, atol=3.0)


def test_a_module_that_nobody_loaded_here_is_not_imported_because_a_message_names_it(code: Path) -> None:
    (code / "dangerous.py").write_text("raise RuntimeError('imported')\n")
    with pytest.raises(SketchError, match=r"is not allowed here: a worker allows it with sketches in worker\.toml"):
        sketch("dangerous:Sketch", d=8, objectives=("a",))
    load_sketch("random_signs:RandomSigns")
    assert sketch("random_signs:RandomSigns", d=8, objectives=("a",)).name == "random_signs:RandomSigns"


def test_a_real_federation_does_not_import_the_attack_of_a_simulation(code: Path) -> None:
    (code / "dangerous.py").write_text("raise RuntimeError('imported')\n")
    text = 'name = "a"\ntask = "digits"\nrounds = 1\n[simulation]\nattackers = 1\nattack = "ATTACK"\n'
    assert parse_run(text.replace("ATTACK", "dangerous:Attack"))[0].simulation.attack == "dangerous:Attack"
    with pytest.raises(ValueError, match=r"'sign-flop' is no attack; did you mean 'sign-flip'\? there are"):
        parse_run(text.replace("ATTACK", "sign-flop"))


# ---- refused


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere_at_all:Mean", "no module 'nowhere_at_all': name its directory with --code DIR or in FEDPARETO_CODE"),
        ("worst_first:Wurst", f"{EXAMPLES / 'worst_first.py'} has no 'Wurst'"),
        ("equal_length:EqualLength", "equal_length:EqualLength is not a subclass of fedpareto.Rule"),
        ("this:s", "this is a module of Python itself"),
        ("os.path:join", "os.path is a module of Python itself"),
        ("fedpareto:Rule", "Can't instantiate abstract class Rule"),
        (":Mean", "expected a name, or module:Class"),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused_with_what_is_wrong(code: Path, name: str, says: str) -> None:
    with pytest.raises(HyperparameterError) as caught:
        algorithm(name)
    assert str(caught.value).startswith(f"name: algorithm {name!r}: ")
    assert says in str(caught.value)
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import not_there\n", ["ModuleNotFoundError: No module named 'not_there'", "line 3", "import not_there"]),
        ("raise SystemExit(3)\n", ["SystemExit: 3", "line 3", "raise SystemExit(3)"]),
        (
            MEAN.replace("FIELD", "def __post_init__(self): sise"),
            ["making Mean failed: NameError: name 'sise' is not defined", "line 6, in __post_init__", "sise"],
        ),
        (MEAN.replace("FIELD", "power: float"), ["power: made:Mean needs a value for it"]),
        (
            MEAN.replace("@dataclass(frozen=True, kw_only=True)\n", "").replace("FIELD", "p: int = option(1, '')"),
            ["p: Mean is not a dataclass: write @dataclass(frozen=True, kw_only=True) above it"],
        ),
    ],
    ids=["missing import", "exit", "constructor", "no default", "no dataclass"],
)
def test_an_error_in_the_code_of_a_rule_says_where_it_was_raised(code: Path, text: str, says: list[str]) -> None:
    with pytest.raises(HyperparameterError) as caught:
        algorithm(rule(code, text))
    for words in says:
        assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) in (1, 3)


def test_types_of_hyperparameters_are_read_from_postponed_annotations_too(code: Path) -> None:
    name = rule(code, MEAN.replace("FIELD", "power: 'float | str' = option(1.0, 'how much')"))
    assert algorithm(name, {"power": 2}).power == 2.0  # type: ignore[attr-defined]
    with pytest.raises(HyperparameterError, match="power must be a number or text; got True"):
        algorithm(name, {"power": True})


def test_a_name_that_two_packages_bring_is_refused_with_both(packages: Path) -> None:
    other = packages / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[fedpareto.rules]\nworst-first = other:Rule\n")
    with pytest.raises(HyperparameterError, match=r"comes with several packages \(.*other.*\): name it as"):
        algorithm("worst-first")


def test_an_experiment_that_cannot_be_used_is_named(packages: Path) -> None:
    with pytest.raises(ExperimentError, match=r"there is no file .*broken-experiment\.toml"):
        load_experiment("broken-experiment")


def test_every_kind_of_plug_in_says_the_base_class_that_owners_know() -> None:
    with pytest.raises(PluginError, match=r"stage 'federation.* is not a subclass of fedpareto\.Stage"):
        Plugins("stage", "fedpareto.stages", int, "fedpareto.Stage").find("federation.spec.run_spec:RunSpec")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        (MEAN.replace("FIELD", "def cautions(self): return 1 / 0"), "asking it for cautions failed: ZeroDivisionError"),
        (MEAN.replace("FIELD", "def fit(self, names): return 1 / 0"), "the objectives failed: ZeroDivisionError"),
    ],
    ids=["import", "cautions", "fit"],
)
def test_a_coordinator_refuses_a_run_whose_rule_fails_and_goes_on(
    stage: Stage, code: Path, text: str, says: str, request: pytest.FixtureRequest
) -> None:
    name = rule(code, text, f"failing_{request.node.callspec.id}")
    with pytest.raises(grpc.RpcError) as caught:
        stage.submit(spec(f"failing-{stage.count}", stage.task(), algorithm=name))
    refusal = refusal_from_rpc_error(caught.value)
    assert refusal.reason == "spec"
    assert says in refusal.message
    assert stage.submit(spec(f"sound-{stage.count}", stage.task(), algorithm=rule(code, MEAN.replace("FIELD", ""))))


def test_a_rule_that_fails_in_a_round_pauses_its_own_run_with_file_and_line(stage: Stage, code: Path) -> None:
    name = rule(code, MEAN.replace("FIELD", "").replace("return conclude", "raise SystemExit(3) #"), "exits")
    task, players = stage.crew("ann", "ben")
    failing = stage.submit(spec(f"exits-{stage.count}", task, algorithm=name, more="selection.minimum = 2"))
    stage.play(failing, *players, until=lambda: stage.run(failing).state is RunState.PAUSED)
    reason = " ".join(stage.run(failing).reason.split())
    assert reason.startswith(
        f"error: algorithm {name!r}: combine failed: SystemExit: 3 {code / 'exits.py'}, line 8, in combine raise"
    )
    sound = stage.submit(spec(f"goes-on-{stage.count}", task, more="selection.minimum = 2"))
    stage.play(sound, *players)
    assert stage.run(sound).state is RunState.COMPLETED


def test_commands_say_in_words_that_the_answer_of_a_rule_cannot_be_used(code: Path) -> None:
    name = rule(code, MEAN.replace("FIELD", "").replace("return conclude", "return rows.prior #"), "answers")
    (code / "run.toml").write_text(
        f'name = "a"\ntask = "digits"\nrounds = 1\nsimulation.clients = 2\nalgorithm.name = "{name}"\n'
    )
    np.savez(code / "updates.npz", updates=np.eye(2))
    for arguments in (("simulate", "run.toml", "--threads", "1"), ("aggregate", "updates.npz", "--algorithm", name)):
        done = completed(["-m", "fedpareto", *arguments, "--code", "."], cwd=code)
        assert done.returncode == 1
        assert (
            f"fedpareto: algorithm {name!r}: the answer of combine cannot be used: it is an array (2,)" in done.stderr
        )
        assert "Traceback" not in done.stderr


def test_a_run_whose_rule_is_gone_after_a_restart_is_paused_and_goes_on_when_it_is_back(
    stage: Stage, code: Path
) -> None:
    name = rule(code, MEAN.replace("FIELD", ""), "comes_back")
    run, players = stage.begin("ann", "ben", algorithm=name, more="selection.minimum = 2")

    def forget() -> None:
        (code / "comes_back.py").rename(code / "kept")
        del sys.modules["comes_back"]
        invalidate_caches()

    stage.restart(between=forget)
    reason = stage.wait_state(run, RunState.PAUSED).reason
    assert reason.startswith("algorithm.name: algorithm 'comes_back:Mean': there is no module 'comes_back'")
    assert reason.endswith("repair it, then resume the run")
    (code / "kept").rename(code / "comes_back.py")
    invalidate_caches()
    stage.come_back()
    stage.resume(run, *players)
    assert stage.run(run).state is RunState.COMPLETED


def test_a_step_names_the_package_and_version_of_a_rule_and_the_file_as_it_was_imported(packages: Path) -> None:
    (packages / "example.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: example\nVersion: 2.5\n")
    shutil.copy(EXAMPLES / "worst_first.py", packages / "changing.py")
    worst, stage = (digest((EXAMPLES / f"{name}.py").read_bytes()) for name in ("worst_first", "equal_length"))
    assert origins(algorithm("worst-first", {"pre": ["clip", "equal-length"]})) == (
        CodeOrigin("algorithm", "worst_first:WorstFirst", "example", "2.5", worst),
        CodeOrigin("stage", "equal_length:EqualLength", "example", "2.5", stage),
    )
    found = algorithm("changing:WorstFirst")
    (packages / "changing.py").write_text("")
    assert origins(found) == (CodeOrigin("algorithm", "changing:WorstFirst", digest=worst),)
    assert origins(algorithm("fedcmoo", {"sketch": "random-signs"}))[1].package == "example"
    (median,) = origins(algorithm("median"))
    assert (median.package, median.version, median.digest) == ("fedpareto", version("fedpareto"), "")
    (upgrad,) = origins(algorithm("torchjd:upgrad"))
    assert (upgrad.package, upgrad.version) == ("torchjd", version("torchjd"))


# ---- listed


def listing(*arguments: str, code: Path) -> Any:
    done = completed(["-m", "fedpareto", *arguments, "--code", str(code), "--code", str(EXAMPLES), "--json"])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_lists_show_what_plug_ins_bring_and_which_cannot_be_used(packages: Path) -> None:
    listed = listing("aggregate", "--list", code=packages)
    rules = {entry["name"]: entry for entry in listed["algorithms"]}
    assert rules["worst-first"]["summary"] == "Averages the updates of the clients that report the highest losses."
    assert [each["name"] for each in rules["worst-first"]["hyperparameters"]] == ["share"]
    assert rules["broken-rule"]["summary"].startswith("cannot be used: algorithm 'broken-rule': there is no module")
    assert [stage["name"] for stage in listed["stages"]] == ["equal-length"]
    listed = listing("experiment", "list", code=packages)
    assert "my-experiment" in {item["name"] for item in listed["experiments"]}
    assert [item["name"] for item in listed["unusable"]] == ["broken-experiment"]


def test_attacks_of_plug_ins_are_listed(packages: Path) -> None:
    found = {entry.spelling: entry.summary for entry in entries()}
    assert found["backwards:factor=1"] == "Sends c times its update with the entries in reverse order."
    assert found["broken-attack"].startswith("cannot be used: attack 'broken-attack'")


def test_completion_offers_plug_ins(packages: Path) -> None:
    assert completion.algorithms("worst") == ["worst-first"]
    assert completion.attacks("back") == ["backdoor", "backwards"]
    assert completion.tasks("tum") == ["tumours"]
    assert completion.experiments("my") == ["my-experiment"]
