"""`worker.toml`: its keys, what wins over it, what is refused, and the commands that read it."""

import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from federation.training.trainers import TrainerChoice
from fedpareto.cli.failure import USAGE, CommandFailure
from fedpareto.cli.main import app
from fedpareto.cli.member.trainer_choices import trainers_of
from tests.command_lines import completed, failure, fedpareto_command
from tests.paths import OWNERS_CODE
from worker.config import OPTIONS, WorkerConfig, WorkerConfigError, write_template

# What `worker run` had options for, by the key that each became.
REMOVED = {
    "--part": "part", "--partition": "partition", "--sizes": "sizes", "--part-seed": "part_seed",
    "--objectives": "objectives", "--trainer": "trainer", "--trainer-command": "trainer_command",
    "--trainer-silence": "trainer_silence", "--processes": "processes", "--sketch": "sketches",
    "--threads": "threads", "--loader-workers": "loader_workers", "--pin-memory": "pin_memory",
    "--download": "download", "--attack": "attack", "--accomplices": "accomplices",
    "--passphrase-file": "passphrase_file", "--proxy": "proxy", "--spec": "spec",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command does to Python's path, and to the environment of its processes, ends with the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("FEDPARETO_CODE", "")


def written(path: Path, text: str) -> WorkerConfig:
    path.write_text(f"format = 1\n{text}")
    return WorkerConfig.load(path)


def refused(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(WorkerConfigError) as caught:
        WorkerConfig.load(path)
    return str(caught.value)


def shown(*arguments: str, **env: str) -> dict[str, tuple[Any, str]]:
    """By key: the value that `worker config` shows, and its source."""
    done = CliRunner().invoke(app, ["worker", "config", "--json", *arguments], env=env)
    assert done.exit_code == 0, done.exception
    return {row["key"]: (row["value"], row["source"]) for row in json.loads(done.stdout)["settings"]}


@contextmanager
def mode(path: Path, bits: int) -> Iterator[None]:
    before = stat.S_IMODE(path.stat().st_mode)
    path.chmod(bits)
    try:
        yield
    finally:
        path.chmod(before)


def test_every_option_that_worker_run_no_longer_has_is_a_key_and_ten_remain_with_json() -> None:
    command = fedpareto_command().commands["worker"].commands["run"].loaded
    left = {name for option in command.params for name in option.opts}
    remaining = {"--home", "--config", "--task", "--data", "--code", "--device", "--rehearse", "--set", "--json"}
    assert left == remaining | {"--log-level", "--log-format"}
    assert {*REMOVED.values(), *OPTIONS, "notify.command", "notify.seconds"} == set(WorkerConfig.names())
    assert set(OPTIONS.values()) < left


def test_a_new_file_has_every_key_with_its_default_in_comments_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "worker.toml"
    assert write_template(path, proxy="direct")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert WorkerConfig.load(path).model_dump(exclude_unset=True) == {"format": 1, "proxy": "direct"}
    keys = [line.removeprefix("# ") for line in text.splitlines() if " = " in line and not line.startswith("# An")]
    assert [key.partition(" = ")[0] for key in keys] == ["format", *WorkerConfig.names()]
    path.write_text("\n".join(key for key in keys if not key.startswith("proxy")))
    assert WorkerConfig.load(path) == WorkerConfig(format=1)
    assert not write_template(path), "a file that is there stays"


def test_an_option_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    ours, theirs, third = (str(tmp_path / name) for name in ("ours", "theirs", "third"))
    for directory in (ours, theirs, third):
        Path(directory).mkdir()
    written(tmp_path / "worker.toml", 'code = ["ours"]\ndevice = "cuda"\nthreads = 3\ntasks = ["digits"]\n')
    home = ("--home", str(tmp_path))
    found = shown(*home)
    assert (found["code"], found["threads"]) == (([ours], "file"), (3, "file"))
    assert found["data"] == ("", "default")
    assert shown(*home, FEDPARETO_CODE=theirs)["code"] == ([theirs], "environment")
    found = shown(
        *home, "--code", third, "--device", "cpu", "--set", "threads=4", "--set", "threads=5", FEDPARETO_CODE=theirs
    )
    assert (found["code"], found["device"]) == (([third], "option"), ("cpu", "option"))
    assert found["threads"] == (5, "option"), "the later one of two"


def test_a_list_replaces_a_list_and_values_of_tasks_that_are_left_out_go_with_them(tmp_path: Path) -> None:
    file = written(
        tmp_path / "worker.toml",
        'tasks = ["digits", "mnist"]\nsketches = ["a:A", "b:B"]\ntrainer = { digits = "torch", mnist = "x:X" }\n',
    )
    assert file.of_tasks("trainer") == {"digits": "torch", "mnist": "x:X"}
    changed = file.changed(["sketches=c:C,d:D"], tasks=("mnist",))
    assert (changed.tasks, changed.sketches) == (("mnist",), ("c:C", "d:D"))
    assert changed.of_tasks("trainer") == {"mnist": "x:X"}
    assert file.changed(['sketches=["e:E"]']).sketches == ("e:E",)


def test_a_table_of_the_file_is_shown_by_its_keys_and_changed_key_by_key(tmp_path: Path) -> None:
    written(tmp_path / "worker.toml", '[notify]\ncommand = ["bin/tell", "a b"]\n')
    found = shown("--home", str(tmp_path), "--set", "notify.seconds=5")
    assert found["notify.command"] == ([str(tmp_path / "bin/tell"), "a b"], "file"), "a path is beside the file"
    assert found["notify.seconds"] == (5, "option")
    assert shown("--home", str(tmp_path / "none"))["notify.seconds"] == (30, "default")
    file = WorkerConfig.load(tmp_path / "worker.toml")
    assert file.changed(['notify.command=["mail", "x,y"]']).notify.command == ("mail", "x,y")


def test_set_takes_each_kind_of_value_and_a_table_by_task(tmp_path: Path) -> None:
    settings = [
        "threads=2", "pin_memory=true", "trainer_silence=30", "proxy=http://p:1", "attack=alie:z=1",
        "objectives.two=left, right", "trainer.a.b:C=x:X", "trainer_command.two=srun --x=1 fedpareto worker trainer",
    ]  # fmt: skip
    found = WorkerConfig(format=1).changed(settings, tasks=("two", "a.b:C"))
    assert (found.threads, found.pin_memory, found.trainer_silence, found.proxy) == (2, True, 30, "http://p:1")
    assert (found.attack, found.of_tasks("objectives")) == ("alie:z=1", {"two": ("left", "right")})
    assert trainers_of(found) == {
        "a.b:C": TrainerChoice(name="x:X"),
        "two": TrainerChoice(command="srun --x=1 fedpareto worker trainer", silence=30),
    }
    assert WorkerConfig(format=1).changed(["objectives=left"], tasks=("two",)).of_tasks("objectives") == {
        "two": ("left",)
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("format = 1\n\nthread = 3", "line 3: thread: no such key; did you mean 'threads'? `fedpareto worker config`"),
        ("format = 1\nthreads = 'four'", "line 2: threads: Input should be a valid integer; got 'four'"),
        ("format = 1\n# a\ntasks = 'digits'", "line 3: tasks: Input should be a valid tuple"),
        ("format = 1\n[trainer]\ndigits = 3", "line 3: trainer.digits: Input should be a valid string; got 3"),
        ("format = 1\n[limits]\nsamples = 1", "line 2: limits: no such key"),
        ("threads = 3", "format: missing"),
        ("format = 2", "line 1: format: this version of fedpareto reads format 1; got 2"),
        ("format = 1\nthreads = = 3", "is not a TOML document: Invalid value (at line 2, column 11)"),
        ("format = 1\ntasks = ['a', 'b']\ntrainer = 'torch'", 'trainer "torch": of which task?'),
        ("format = 1\ntasks = ['digits']\ntrainer.digit = 'a'", "trainer: 'digit' is none of the tasks; did you mean"),
        ("format = 1\ntasks = ['a']\ntrainer = 'a'\ntrainer_command = 'b'", "choose one of trainer and"),
        ("format = 1\n[notify]\nsecond = 3", "line 3: notify.second: no such key; did you mean 'seconds'?"),
        ("format = 1\n[notify]\nseconds = 0", "line 3: notify.seconds: Input should be greater than or equal to 1"),
        (
            "format = 1\nnotify.command = 'mail a'",
            "line 2: notify.command: 'mail a' is one text, and no shell reads it",
        ),
        ("format = 1\nnotify.command = ['']", "notify.command: the first text of the list names the program"),
        ("format = 1\nnotify.command = ['a', '\\u0000']".replace("'\\u0000'", '"\\u0000"'), "hold the character NUL"),
        ("format = 1\naccomplices = 'shared'", "shared: without attack there is nothing to do together"),
        ("format = 1\nproxy = 'http://u:secret@h:1'", "line 2: proxy: a user and password do not belong here"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_line_and_key(tmp_path: Path, text: str, words: str) -> None:
    message = refused(tmp_path / "worker.toml", text)
    assert words in message
    assert str(tmp_path / "worker.toml") in message
    assert "secret" not in message


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("threads", "--set threads: write KEY=VALUE"),
        ("thread=3", "there is no key 'thread'; did you mean 'threads'?"),
        ("threads=four", "threads: Input should be a valid integer; got 'four'"),
        ("threads=4\nprocesses=2", "threads: Input should be a valid integer"),
        ("threads.digits=4", "threads is one value, not a table"),
        ("notify.comand=mail", "there is no key 'notify.comand'; did you mean 'notify.command'?"),
        ("notify.seconds=soon", "notify.seconds: Input should be a valid number"),
        ("pin_memory=yes", "pin_memory: Input should be a valid boolean; got 'yes'"),
        ("device=cpu", "this key has an option of its own: --device cpu"),
        ("format=1", "there is no key 'format'"),
        ("proxy=http://u:secret@h:1", "proxy: a user and password do not belong here"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_with_its_key(setting: str, words: str) -> None:
    ended = failure("worker", "run", "--task", "digits", "--set", setting)
    assert (ended.code, words in ended.message) == (USAGE, True), ended.message
    assert "secret" not in ended.message.removeprefix(f"--set {setting}")


def test_a_file_that_others_can_write_or_replace_is_refused_with_the_remedy(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    path, linked = home / "worker.toml", tmp_path / "linked.toml"
    written(path, "threads = 2")
    linked.symlink_to(path)
    for place, bits in ((path, 0o620), (path, 0o602), (home, 0o770), (home, 0o707)):
        with mode(place, bits):
            for name in (path, linked):
                with pytest.raises(WorkerConfigError) as caught:
                    WorkerConfig.load(name)
                assert f"others can write {place} (mode {bits:04o}): chmod go-w {place}" in str(caught.value)
    with mode(tmp_path, 0o777), pytest.raises(WorkerConfigError, match="others can write"):
        WorkerConfig.load(linked)  # the link itself could be replaced
    with mode(tmp_path, 0o1777):  # as /tmp, where nobody replaces what is another's
        assert WorkerConfig.load(linked).threads == 2
    path.chmod(0o666)
    ended = failure("worker", "run", "--home", str(home), "--task", "digits")
    assert (ended.code, "names programs that this worker runs" in ended.message) == (USAGE, True)
    path.chmod(0o644)  # others may read it
    assert WorkerConfig.load(path).threads == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "worker.toml", "")
    os.chown(tmp_path / "worker.toml", 54321, -1)
    with pytest.raises(WorkerConfigError, match=r"belongs to another user \(uid 54321\), who can change it: chown 0 "):
        WorkerConfig.load(tmp_path / "worker.toml")


def test_a_file_that_nobody_can_write_is_read_and_its_paths_are_beside_it(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    (mount / "code").mkdir()
    path = mount / "settings.toml"
    written(path, 'data = "data"\ncode = ["code"]\nproxy = "@proxy"\npassphrase_file = "/run/secret"\n')
    path.chmod(0o444)
    with mode(mount, 0o555):
        found = shown("--home", str(tmp_path / "none"), "--config", str(path))
        assert not (tmp_path / "none").exists()
    assert found["data"] == (str(mount / "data"), "file")
    assert found["code"] == ([str(mount / "code")], "file")
    assert found["proxy"] == (f"@{mount / 'proxy'}", "file")
    assert found["passphrase_file"] == ("/run/secret", "file")
    missing = failure("worker", "run", "--config", str(mount / "none.toml"))
    assert missing.message == f"--config {mount / 'none.toml'}: there is no such file"


def test_worker_run_and_doctor_need_no_option_beside_a_file(tmp_path: Path) -> None:
    task = "talkative_task:Talkative"
    (tmp_path / "run.toml").write_text(f'name = "x"\ntask = "{task}"\nrounds = 1\n[train]\nsteps = 2\n')
    settings = f'tasks = ["{task}"]\ncode = ["{OWNERS_CODE}"]\npart = "1/8"\ndevice = "cpu"\nspec = "run.toml"\n'
    written(tmp_path / "worker.toml", settings)
    done = CliRunner().invoke(app, ["worker", "run", "--home", str(tmp_path), "--rehearse"])
    assert f"{task} on " in done.output, done.exception
    assert "2 steps a round" in done.output
    checked = CliRunner().invoke(app, ["worker", "doctor", "--home", str(tmp_path), "--address", "localhost:1"])
    assert re.search(rf"ok +data +{task}: \d+ training samples", checked.output), checked.output
    assert failure("worker", "run", "--home", str(tmp_path / "none")).message.startswith("no task: name it with --task")


def test_the_doctor_says_which_file_it_has_found_and_goes_on_without_one_that_cannot_be_used(tmp_path: Path) -> None:
    def found() -> dict[str, Any]:
        arguments = ["worker", "doctor", "--home", str(tmp_path), "--address", "localhost:1", "--json"]
        done = CliRunner().invoke(app, arguments)
        assert isinstance(done.exception, CommandFailure)
        return {row["subject"]: (row["outcome"], row["message"]) for row in json.loads(done.stdout)}

    path = tmp_path / "worker.toml"
    assert found()["config"] == ("ok", f"no {path}: the defaults, and the options of the command")
    written(path, "threads = 2\nprocesses = 1\n")
    checks = found()
    assert checks["config"] == ("ok", f"{path} sets threads, processes")
    assert "notify" not in checks
    written(path, '[notify]\ncommand = ["sh", "-c"]\n')
    checks = found()
    assert checks["config"][1].endswith("sets notify.command")
    assert (checks["notify"][0], "/sh tells the owner; it is not run now" in checks["notify"][1]) == ("ok", True)
    written(path, '[notify]\ncommand = ["./none"]\n')
    checks = found()
    assert checks["notify"][0] == "failed"
    assert f"names {tmp_path / 'none'}, which is no program that this user can run" in checks["notify"][1]
    path.write_text("format = 1\nthread = 2\n")
    checks = found()
    assert checks["config"][0] == "failed"
    assert "line 2: thread: no such key; did you mean 'threads'?" in checks["config"][1]
    assert checks["device"][0] in ("ok", "warning")


def test_tab_completes_keys_and_the_names_of_attacks(tmp_path: Path) -> None:
    assert completed(tmp_path, "worker run --set trainer_") == ["trainer_command=", "trainer_silence="]
    assert completed(tmp_path, "worker run --set attack=back") == ["attack=backdoor"]
