"""The examples of the page on plug-ins, in a federation of real processes: each is named and trained with."""

import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from federation.digests import digest
from federation.v1.common_pb2 import ReplyManifest, SignedEnvelope, StepManifest
from fedpareto.code_path import VARIABLE
from fedpareto.processes.forked import completed
from tests.harness import Federation, federation
from tests.paths import DOCS, EXAMPLES

PAGE = (DOCS / "research/plugins.md").read_text()
SKETCH = "random_signs:RandomSigns"


def specification(name: str, rounds: int = 2) -> str:
    """A specification of the page, without its name, with fewer rounds."""
    found = re.search(rf'^```toml\n(?:# .*\n)?name = "{name}"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL)
    assert found, name
    text = re.sub(r"^rounds = .*$", f"rounds = {rounds}", found[1], flags=re.MULTILINE)
    return f"{text}\n[evaluate]\nevery = 0\n[selection]\nminimum = 3\nquorum = 1.0\n"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A coordinator and three workers that know the examples; one of them attacks."""
    directory = tmp_path_factory.mktemp("plugins")
    with pytest.MonkeyPatch.context() as patch, federation(directory) as made:
        patch.setenv(VARIABLE, str(EXAMPLES))
        made.serve()
        patch.delenv(VARIABLE)
        for at, name in enumerate(("ann", "ben", "eve")):
            made.join(name)
            own = ["--set", "attack=backwards:Backwards:factor=3"] if name == "eve" else []
            tasks = ["--task", "two-digits", "--set", f"sketches={SKETCH}"]
            made.work(name, *tasks, "--set", f"part={at + 1}/3", "--code", str(EXAMPLES), *own)
        made.attending("ann", "ben", "eve")
        yield made


def steps(made: Federation, run: str) -> list[StepManifest]:
    rows = made.query("select step from rounds where run_id = :run order by number", run=run)
    return [StepManifest.FromString(SignedEnvelope.FromString(row[0]).manifest) for row in rows]


def test_a_rule_and_a_stage_of_ones_own_make_the_steps_of_a_run(running: Federation) -> None:
    text = specification("worst-first").replace("share = 0.25", 'share = 0.25\npre = ["equal_length:EqualLength"]')
    run = running.completed("worst-first", text)
    for step in steps(running, run):
        assert step.algorithm == "worst_first:WorstFirst"
        assert [(code.kind, code.class_name, code.package, code.digest) for code in step.code] == [
            ("algorithm", "worst_first:WorstFirst", "", digest((EXAMPLES / "worst_first.py").read_bytes())),
            ("stage", "equal_length:EqualLength", "", digest((EXAMPLES / "equal_length.py").read_bytes())),
        ]
        assert sorted(map(bool, step.coefficients)) == [False, False, True]  # the one with the highest loss
    shown = running.fedpareto("admin", "--home", str(running.home / "admin"), "round", run, "0")
    assert re.search(r"algorithm +worst_first:WorstFirst, file [0-9a-f]{12}", shown)
    assert re.search(r"stage +equal_length:EqualLength, file [0-9a-f]{12}", shown)


def test_an_attack_of_ones_own_is_rehearsed_by_a_real_worker(running: Federation) -> None:
    assert "this worker is dishonest, backwards:Backwards:factor=3" in running.processes[-1].text


@pytest.mark.full
def test_a_sketch_of_ones_own_is_sent_by_workers_that_allow_it(running: Federation) -> None:
    run = running.completed("random-signs", specification("random-signs", rounds=1))
    (step,) = steps(running, run)
    assert [(code.kind, code.class_name, code.package, code.version) for code in step.code] == [
        ("algorithm", "FedCMOO", "fedpareto", version("fedpareto")),
        ("sketch", SKETCH, "", ""),
    ]
    sent = running.query(
        "select u.envelope from replies u join assignments a using (assignment_id) join phases p using (phase_id) "
        "join rounds r using (round_id) where r.run_id = :run and p.number = 0",
        run=run,
    )
    manifests = [ReplyManifest.FromString(SignedEnvelope.FromString(row[0]).manifest) for row in sent]
    assert [[row.name for row in manifest.rows] for manifest in manifests] == [["products"]] * 3


def test_the_machine_that_submits_needs_no_rule_and_the_coordinator_explains_a_wrong_one(running: Federation) -> None:
    for name, says in (
        ("worst_first:Wurst", "has no 'Wurst'"),
        ("fedmagic", "no algorithm 'fedmagic'; there are fedavg, fedavg-n, "),
        ("nowhere:Rule", "there is no module 'nowhere': name its directory with --code DIR"),
    ):
        path = running.directory / "wrong.toml"
        path.write_text(f'name = "wrong"\ntask = "digits"\nrounds = 1\n[algorithm]\nname = "{name}"\n')
        admin = ["admin", "submit", str(path), "--home", str(running.home / "admin")]
        done = completed(["-m", "fedpareto", *admin], cwd=running.directory)
        assert done.returncode == 1
        assert says in done.stderr
        assert "[spec]" in done.stderr


@pytest.mark.full
def test_the_experiment_of_a_package_is_run_by_its_name(tmp_path: Path) -> None:
    package = tmp_path / "code" / "own_experiments"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    text = (EXAMPLES / "my-experiment.toml").read_text().replace('name = "fedavg"', 'name = "worst_first:WorstFirst"')
    (package / "my-experiment.toml").write_text(text)
    (tmp_path / "code" / "own.dist-info").mkdir()
    (tmp_path / "code" / "own.dist-info" / "entry_points.txt").write_text(
        "[fedpareto.experiments]\nmy-experiment = own_experiments\n"
    )
    code = ["--code", str(tmp_path / "code"), "--code", str(EXAMPLES)]
    arguments = ["experiment", "run", "my-experiment", "--rounds", "1", "--seeds", "0", "--out", str(tmp_path / "out")]
    done = completed(["-m", "fedpareto", *arguments, *code, "--json"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["experiment"], len(document["results"])) == ("my-experiment", 2)
