import json
import math
import re
import shutil
import signal
import time
import tomllib
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from federation.record.metric_definitions import DEFINITIONS, definition, in_groups
from federation.spec.run_spec import RunSpec
from federation.v1.admin_pb2 import ExportModelResponse, GetRoundResponse, Participation, RoundSummary, Run, Serving
from federation.v1.common_pb2 import AssignmentState, RoundState, RunState, StepManifest
from fedpareto import formatting
from fedpareto.cli import document
from fedpareto.cli.admin import download
from fedpareto.cli.commands import HEADINGS, TABLE
from fedpareto.cli.failure import INTERRUPTED, CommandFailure
from fedpareto.cli.main import app, main
from fedpareto.cli.research import explain
from fedpareto.cli.show import heat_map, round_tables, tables
from tests import harness
from tests.command_lines import command_paths, failure, fedpareto_command
from tests.fedpareto.cli.scene import shown

# What help and parameters of commands name outside the modules of the commands. Each imports nothing but Python's own.
LIGHT = (
    "federation.errors",
    "federation",
    "federation.findings",
    "federation.transport",
    "federation.transport.tls",
    "federation.owners_code",
    "federation.record",
    "federation.record.log_kinds",
    "federation.spec",
    "federation.spec.accounting",
    "federation.text",
    "fedpareto",
    "fedpareto.code_path",
    "fedpareto.web",
    "fedpareto.web.serving",
    "fedpareto.on_first_use",
    "fedpareto.standard_streams",
)

SPEC = 'name = "a"\ntask = "digits"\nrounds = 2\n'


fedpareto = partial(harness.fedpareto, COLUMNS="100")


@pytest.mark.parametrize("path", command_paths(), ids=" ".join)
def test_every_command_explains_itself(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*path, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.stdout
    command: Any = fedpareto_command()
    for name in path:
        row = command.commands[name]
        command = getattr(row, "loaded", row)
        assert command.get_short_help_str() == row.get_short_help_str(), "the table has another first sentence"
    assert command.help
    assert all(
        getattr(parameter, "help", "help") for parameter in command.params if not parameter.name.endswith("completion")
    )


@pytest.mark.parametrize("path", command_paths(), ids=" ".join)
def test_help_fits_a_terminal_of_80_columns_with_nothing_cut_off(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = CliRunner().invoke(app, [*path, "--help"], prog_name="fedpareto").stdout.splitlines()
    assert not [line for line in lines if len(line) > 80]
    # Three dots mean "and more" in a usage line and a metavar; click cuts the summary of a command with three dots too.
    commands = lines[lines.index("Commands:") :] if "Commands:" in lines else []
    assert not [line for line in commands if line.endswith("...")]
    assert not [line for line in lines if "…" in line or "**" in line]


def test_each_command_of_admin_is_below_one_of_five_headings() -> None:
    help_text = CliRunner().invoke(app, ["admin", "--help"], prog_name="fedpareto").stdout
    headings = re.findall(r"^(\S.*):$", help_text.partition("Options:\n")[2], re.MULTILINE)
    assert headings == list(HEADINGS["admin"])
    assert len(headings) == 5
    placed = [name for names in HEADINGS["admin"].values() for name in names]
    assert sorted(placed) == sorted(TABLE["admin"])


def test_no_help_imports_the_work_of_a_command() -> None:
    program = (
        "import json, sys\n"
        "known, found = set(sys.modules), {}\n"
        "from typer.testing import CliRunner\n"
        "from fedpareto.cli.main import app\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    assert CliRunner().invoke(app, [*words, '--help']).exit_code == 0\n"
        "    new = {name for name in sys.modules if name.partition('.')[0] not in sys.stdlib_module_names} - known\n"
        "    found[' '.join(words)], known = sorted(new), known | new\n"
        "print(json.dumps(found))\n"
    )
    found = json.loads(harness.python("-c", program, json.dumps(command_paths())).stdout)
    assert "fedpareto.cli.research.simulate" in found["simulate"]
    own = re.compile(rf"(typer|annotated_doc|shellingham|fedpareto\.cli)(\.|$)|({'|'.join(map(re.escape, LIGHT))})$")
    work = {words: [name for name in names if not own.match(name)] for words, names in found.items()}
    assert {words: names for words, names in work.items() if names} == {}


def test_a_word_that_reads_like_a_wish_for_help_can_be_the_value_of_an_option() -> None:
    stopped = failure("admin", "stop", "RUN", "--yes", "--reason", "--help", "--home", "nowhere")
    assert "nowhere is not an administrator's directory" in stopped.message


def test_the_version_is_that_of_the_distribution() -> None:
    assert fedpareto("--version").stdout == f"fedpareto {version('fedpareto')}\n"


def test_without_arguments_it_shows_where_to_begin() -> None:
    done = fedpareto(code=2)
    assert "fedpareto demo" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments", [("nonsense",), ("admin", "rounds"), ("admin", "round", "a", "b"), ("demo", "--rounds", "0")]
)
def test_bad_usage_ends_with_exit_code_2(arguments: tuple[str, ...]) -> None:
    assert fedpareto(*arguments, code=2).stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "not a TOML document"),
        ('task = "digits"\nrounds = 2', "name: missing"),
        (SPEC.replace("2", '"30"'), "rounds: Input should be a valid integer; got '30'"),
        (SPEC + "[train]\nepochs = -1", "train.epochs: Input should be greater than or equal to 0; got -1"),
        (SPEC + "[train]\nepoch = 1", "train.epoch: no such key"),
        (SPEC + "[train]\nepochs = 1\nsteps = 5", "train: give either epochs or steps"),
        (SPEC + '[selection]\nmethod = "some"', "selection.method"),
        (SPEC + "[server]\ntau = 1.0", 'server: tau is for optimizer = adam or yogi or adagrad, not for "sgd"'),
        (SPEC + '[simulation]\npartition = "slices"', "simulation.partition: unknown scheme 'slices': use iid"),
        (SPEC + '[simulation]\nsizes = "big"', "simulation.sizes: unknown sizes 'big': use equal or lognormal:SIGMA"),
        (
            SPEC + '[simulation]\npartition = "shards:2"\nsizes = "lognormal:1"',
            "simulation.sizes: sizes 'lognormal:1' go with iid and dirichlet; 'shards:2' has sizes of its own",
        ),
        (
            SPEC + '[simulation]\nattackers = 1\nattack = "tickle"',
            "simulation.attack: 'tickle' is no attack: there are",
        ),
        (SPEC + "[simulation]\nattackers = 1", "simulation: attackers = 1 and attack = '': give both or neither"),
        (SPEC + '[algorithm]\nname = "fedmgda+"\nepsilon = 7', 'algorithm.epsilon must be "auto" or lie in [0, 1]'),
        (SPEC + "[algorithm]\nepsilon = inf", "algorithm: epsilon = inf is not finite"),
        (SPEC + "[algorithm]\nweights = [1.0, nan]", "algorithm: weights = [1.0, nan] is not finite"),
        (SPEC + '[algorithm]\nname = "fedavg"\nepsilon = 0.1', "algorithm.epsilon: fedavg has no such hyper-parameter"),
    ],
)
def test_a_wrong_specification_is_refused_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    result = failure("admin", "submit", str(path))
    assert result.code == 2
    assert str(path) in result.message
    assert message in result.message


def test_an_interrupt_in_the_middle_of_an_import_is_not_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "swallows.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    imported = []

    def command() -> None:
        imported.append(import_module("swallows"))
        time.sleep(60)  # the interrupt ends it

    monkeypatch.setattr("fedpareto.cli.main.program", lambda: command)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)}
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(SystemExit) as caught:
            main()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert caught.value.code == INTERRUPTED
    assert imported


def test_a_wrong_specification_ends_the_command_with_exit_code_2_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SPEC + "[train]\nepochs = -1")
    done = fedpareto("admin", "submit", "run.toml", cwd=tmp_path, code=2)
    assert done.stderr == "fedpareto: run.toml: train.epochs: Input should be greater than or equal to 0; got -1\n"
    assert done.stdout == ""


def test_what_submit_explains_is_a_specification_with_every_key() -> None:
    printed = fedpareto("admin", "submit", "--explain").stdout
    # The document states both measures of local work; unstated, steps replace epochs.
    assert RunSpec.parse(printed) == RunSpec(name="my-run", task="digits", rounds=30)
    keys = {key.path for key in explain.every_key() if not (key.algorithm or key.taken_by or key.default == "")}
    written = tomllib.loads(printed)
    assert keys == {
        f"{section}.{key}" if isinstance(value, dict) else section
        for section, value in written.items()
        for key in (value if isinstance(value, dict) else [""])
    }
    assert '# epsilon = "auto"' in printed
    assert "# momentum, adam, yogi, adagrad: The share of the momentum" in printed
    assert "\n# beta1 = 0.9\n" in printed


def test_the_keys_are_also_there_as_json() -> None:
    keys = json.loads(fedpareto("admin", "submit", "--explain", "--json").stdout)
    epsilon = next(key for key in keys if (key["path"], key["algorithm"]) == ("algorithm.epsilon", "fedmgda+"))
    assert (epsilon["algorithm"], epsilon["default"], epsilon["type"]) == ("fedmgda+", '"auto"', 'number or "auto"')
    assert next(key for key in keys if key["path"] == "name")["default"] is None


def test_a_home_that_is_none_is_named_with_what_to_do(tmp_path: Path) -> None:
    asked = partial(fedpareto, "admin", cwd=tmp_path, code=2)
    demo = "fedpareto-demo/coordinator/admin"
    assert f"{demo} is not an administrator's directory" in asked("runs").stderr
    named = partial(asked, FEDPARETO_ADMIN="elsewhere")
    assert "elsewhere is not an administrator's directory" in named("runs").stderr
    assert "before is not" in named("--home", "before", "runs").stderr
    assert "after is not" in asked("--home", "before", "runs", "--home", "after").stderr


def test_a_coordinator_that_does_not_answer_is_one_clear_sentence(tmp_path: Path) -> None:
    fedpareto("coordinator", "init", "--home", tmp_path / "centre")
    shutil.copytree(tmp_path / "centre" / "admin", tmp_path / "laptop")  # not beside the coordinator's own files
    member = tmp_path / "laptop" / "member.toml"
    member.write_text(member.read_text().replace('"localhost:0"', '"127.0.0.1:1"'))
    said = fedpareto("admin", "--home", tmp_path / "laptop", "runs", code=1).stderr
    assert said.startswith("fedpareto: cannot reach the coordinator at 127.0.0.1:1: no coordinator answers there")
    assert "Traceback" not in said


# --- documents


def test_a_document_has_enums_by_name_times_in_iso_8601_and_null_for_nan() -> None:
    response = GetRoundResponse()
    response.run.state = RunState.RUN_STATE_RUNNING
    response.run.created.FromJsonString("2026-03-01T12:00:00.25Z")
    response.summary.metrics.update({"b": math.inf, "a": 0.5})
    response.participations.append(
        Participation(client_id="x", weight=math.nan, state=AssignmentState.ASSIGNMENT_STATE_REFUSED)
    )
    response.step.manifest = StepManifest(run_id="r", coefficients=[1.0]).SerializeToString()
    response.step.key_id = b"\x01\xff"
    found = json.loads(document.dumps(response))
    assert found["run"]["state"] == "RUNNING"
    assert found["run"]["created"] == "2026-03-01T12:00:00.250000Z"
    assert found["run"]["started"] is None
    assert found["summary"]["metrics"] == {"a": 0.5, "b": None}
    assert found["participations"][0]["weight"] is None
    assert found["participations"][0]["state"] == "REFUSED"
    assert found["step"]["key_id"] == "01ff"
    assert found["step"]["decoded"]["run_id"] == "r"
    assert found["summary"]["round"] == 0


def a_round(m: int) -> GetRoundResponse:
    names = [f"hospital-number-{i}" for i in range(m)]
    cosines = [1.0 if i == j else -0.5 for i in range(m) for j in range(m)]
    response = GetRoundResponse(gram_clients=names, cosines=cosines)
    response.summary.CopyFrom(RoundSummary(round=3, state=RoundState.ROUND_STATE_COMPLETED, asked=m, accepted=m))
    response.summary.metrics.update({"accuracy/mean": 0.912, "direction_norm": 1e-7})
    for name in names:
        response.participations.append(
            Participation(
                client_id=name,
                state=AssignmentState.ASSIGNMENT_STATE_FULFILLED,
                samples=180,
                loss_before=1002.25,
                update_norm=178.8,
                weight=1 / m,
                cosine=0.378,
                key_id="ab" * 32,
                payload_bytes=19_300,
                seconds=0.18,
            )
        )
    return response


@pytest.mark.parametrize("m", [1, 2, 8, 13, 14, 20, 30, 40, pytest.param(300, marks=pytest.mark.full)])
def test_a_round_fits_a_hundred_columns_however_many_clients(m: int) -> None:
    text = shown(round_tables.round_(a_round(m)))
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
    assert text.count("hospital-number-0") >= 1
    if m <= 8:
        assert "1.00" in text
        assert ("-0.50" in text) == (m > 1)


def cosines_of(item: GetRoundResponse) -> tuple[list[str], list[float]]:
    return list(item.gram_clients), list(item.cosines)


def test_the_heat_map_is_red_for_together_and_blue_for_apart() -> None:
    console = Console(width=100, force_terminal=True, color_system="truecolor")
    with console.capture() as capture:
        console.print(heat_map.heat_map(*cosines_of(a_round(2))))
    red, blue = "48;2;255;51;51", "48;2;153;153;255"
    assert red in capture.get()
    assert blue in capture.get()


def test_the_heat_map_says_below_it_what_its_colours_mean() -> None:
    matrix, _, legend = shown(heat_map.heat_map(*cosines_of(a_round(2)))).rstrip().rpartition("\n\n")
    assert "hospital-number-1" in matrix
    assert " ".join(legend.split()) == "blue: against each other -1 0 1 red: together"


def test_a_standstill_is_said_clearly_with_who_may_have_caused_it() -> None:
    item = a_round(3)
    item.summary.reason = "stationary"
    item.summary.metrics["stationary"] = 0.0
    assert "No direction" not in shown(round_tables.round_(item))
    item.summary.metrics["stationary"] = 1.0
    text = " ".join(shown(round_tables.round_(item)).split())
    assert "No direction is good for every participant" in text
    assert "Pareto-stationary" in text
    assert "of length 0" not in text
    assert "of the weight" not in text
    item.participations[0].update_norm = 0.0
    item.participations[2].weight = 0.5
    text = " ".join(shown(round_tables.round_(item)).split())
    assert "hospital-number-0 sent an update of length 0." in text
    assert "hospital-number-2 alone got 50.0 % of the weight" in text


def test_a_round_shows_every_number_once_and_names_the_worst_client() -> None:
    item = a_round(2)
    item.summary.metrics.update(dict.fromkeys(DEFINITIONS, 0.25) | {"corrected": 7.0})
    item.summary.worst_client = "hospital-number-1"
    text = " ".join(shown(round_tables.round_(item)).split())
    assert "worst member hospital-number-1: accuracy 25.0 %" in text
    assert re.search(r"algorithm iterations 0.\d, residual 0.250, corrected 7.000", text)
    grouped = [name for names in in_groups(DEFINITIONS).values() for name in names]
    elsewhere = ["accuracy/worst", "loss/worst", "stationary"]
    assert sorted([*grouped, *elsewhere]) == sorted(name for name in DEFINITIONS if "<" not in name)
    for name in grouped:
        assert f"{definition(name).label} {formatting.format_of(name)(0.25)}" in text
    row = shown(round_tables.rounds([item.summary]))
    assert "hospital-num" in row
    assert max(len(line.rstrip()) for line in row.splitlines()) <= 100


def test_a_round_of_several_objectives_shows_their_weights_and_why_one_was_left_out() -> None:
    item = a_round(3)
    item.participations[1].answered.append(0)
    item.participations[1].reason = "not asked to train: it got as far as phase 0, jacobian"
    item.participations[0].answered.extend([0, 1])
    item.phases.add(phase=0, kind="jacobian", decides=True, asked=4, replied=3, bytes_up=12_000)
    item.phases.add(phase=1, kind="train", decides=True, asked=3, replied=2)
    item.phases[0].started.FromJsonString("2026-03-01T12:00:00Z")
    item.phases[0].ended.FromJsonString("2026-03-01T12:00:02.5Z")
    found = item.objectives
    found.results.add(name="left", weight=0.75, loss=2.5, clients=3)
    found.results.add(name="right", weight=0.25, loss=1.5, clients=2)
    found.results.add(name="hat", weight=math.nan, loss=math.nan, left_out="nobody serves it")
    found.cosines.extend([1.0, -0.4, math.nan, -0.4, 1.0, math.nan, math.nan, math.nan, math.nan])
    found.mode = "min-norm"
    found.notes.append("the programme was infeasible")
    item.summary.metrics.update({"loss/test/left": 2.25, "accuracy/objective/right": 0.5, "objective/conflicts": 1.0})
    text = shown(round_tables.round_(item))
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
    for row in (
        "left 0.750 2.500 2.250 – 3",
        "right 0.250 1.500 – 50.0 % 2",
        "hat – – – – 0 nobody serves it",
        "weights: min-norm",
        "the programme was infeasible",
        "1 left 1.00 -0.40",
        "objectives pairs in conflict 1",
        "jacobian: 3 of 4 replied, 12.0 kB",
        "for 2.50 s",
        "hospital-number-0 accepted",
        "hospital-number-1 answered",
    ):
        assert row in " ".join(text.split()), row


def test_equal_remarks_of_rounds_are_one_line() -> None:
    skipped = [
        RoundSummary(round=number, reason="quorum: 1 of 3 members replied, 2 are needed") for number in range(40)
    ]
    skipped.append(RoundSummary(round=40, reason="another one"))
    text = shown(round_tables.rounds(skipped))
    assert "rounds 0 to 39 (40 rounds): quorum: 1 of 3 members replied, 2 are needed\nround 40: another one" in text


@pytest.mark.parametrize(
    ("clients", "objectives", "expected"),
    [
        (3, 2, "client-0000 ● · client-0001 · ● client-0002 ● · members 2 1"),
        (30, 3, "10: client-0000, … ● · · 10: client-0001, … · ● · 10: client-0002, … · · ● members 10 10 10"),
        (2, 40, "nobody serves objective-2, objective-3"),
    ],
)
def test_the_matrix_of_who_serves_what_fits_however_many(clients: int, objectives: int, expected: str) -> None:
    names = [f"objective-{k}" for k in range(objectives)]
    serving = [Serving(client_id=f"client-{i:04}", objectives=[names[i % objectives]]) for i in range(clients)]
    text = shown(tables.indicator(names, serving))
    assert expected in " ".join(text.split())
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
    everybody = [Serving(client_id=str(i), objectives=names) for i in range(clients)]
    assert f"each of the {clients} members" in shown(tables.indicator(names, everybody))
    assert "no active member" in shown(tables.indicator(names, []))


@pytest.mark.parametrize(
    ("value", "text"), [(0.125, "0.125"), (0.0, "0.000"), (178.796, "178.796"), (1e-7, "1.00e-07"), (math.nan, "–")]
)
def test_numbers_are_short_and_never_hidden(value: float, text: str) -> None:
    assert formatting.number(value) == text


def test_a_run_that_was_never_evaluated_is_shown_without_numbers() -> None:
    text = shown(tables.runs([Run(run_id="0123456789ab", name="n", state=RunState.RUN_STATE_PENDING)]))
    assert "0123456789ab" in text
    assert "–" in text


# --- downloads


def pieces(*chunks: bytes, digest: str, size: int) -> list[ExportModelResponse]:
    return [ExportModelResponse(digest=digest, size=size, chunk=chunk) for chunk in chunks]


def test_a_download_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    from federation.digests import digest

    whole = digest(b"abcdef")
    target = tmp_path / "model.safetensors"
    assert download.save(pieces(b"abc", b"def", digest=whole, size=6), target) == download.Saved(whole, 6, None, None)
    assert target.read_bytes() == b"abcdef"
    for wrong in (
        pieces(b"abc", b"deX", digest=whole, size=6),
        pieces(b"abc", digest=whole, size=6),
        pieces(b"abcdef", digest=whole, size=7),
        [],
    ):
        with pytest.raises(CommandFailure):
            download.save(wrong, target)
    assert target.read_bytes() == b"abcdef"
    assert list(tmp_path.iterdir()) == [target]
