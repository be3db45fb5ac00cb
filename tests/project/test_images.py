"""What images hold and how they run: the Dockerfile, compose.yaml, and the health check of a container."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from federation.spec.part import Part
from tests.command_lines import problem
from tests.harness import federation
from tests.paths import ROOT
from tests.project.scene import PACKAGES, PROJECT, ended
from worker.config import WorkerConfig
from worker.home import WorkerHome

IMAGE = re.compile(r"[a-z0-9-]+:\d+\.\d+(\.\d+)?-[a-z0-9-]+")  # a library image, with an exact version
SECRET = re.compile(r"PASSWORD|SECRET|TOKEN|PASSPHRASE|PRIVATE", re.IGNORECASE)


# --- Dockerfile


class Instruction(NamedTuple):
    name: str
    words: str


def instructions() -> list[Instruction]:
    text = (ROOT / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def of(name: str) -> list[str]:
    return [instruction.words for instruction in instructions() if instruction.name == name]


class Stage(NamedTuple):
    base: str
    name: str
    steps: list[Instruction]


def stages() -> list[Stage]:
    parts: list[Stage] = []
    for instruction in instructions():
        if instruction.name == "FROM":
            base, _, name = instruction.words.partition(" AS ")
            parts.append(Stage(base, name, []))
        else:
            parts[-1].steps.append(instruction)
    return parts


def made_anew(changed: str) -> list[str]:
    """The instructions that a builder repeats after a change of this file: what has it, and all that follows."""
    anew, repeated = set[str](), list[str]()
    for stage in stages():
        dirty = stage.base in anew
        for step in stage.steps:
            *sources, _ = shlex.split(step.words)
            if step.name == "COPY" and sources[0].startswith("--from="):
                dirty = dirty or sources[0].removeprefix("--from=") in anew
            elif step.name == "COPY":
                dirty = dirty or any(Path(changed).is_relative_to(source) for source in sources)
            if dirty:
                repeated.append(f"{step.name} {step.words}")
        if dirty:
            anew.add(stage.name)
    return repeated


def ran(folder: Path, **arguments: str) -> list[str]:
    """What the first RUN of the Dockerfile calls: programs that write down their arguments."""
    for name in ("python", "pip", "uv"):
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/calls\n')
        (folder / name).chmod(0o755)
    environment: dict[str, Any] = {"PATH": f"{folder}:/usr/bin:/bin", **arguments}
    ended("sh", "-c", of("RUN")[0], code=0, **environment)
    calls = (folder / "calls").read_text().splitlines()
    (folder / "calls").unlink()
    return calls


def test_the_base_image_is_pinned_and_the_same_in_every_stage() -> None:
    images = [stage.base for stage in stages() if stage.base not in {other.name for other in stages()}]
    assert len(images) >= 2, "stages that build and one that runs"
    assert len(set(images)) == 1
    assert IMAGE.fullmatch(images[0]), images[0]
    assert images[0].startswith(f"python:{PROJECT['project']['requires-python'].removeprefix('>=')}.")


def test_the_container_runs_as_a_numbered_user_that_is_not_root() -> None:
    users = [instruction.words for instruction in stages()[-1].steps if instruction.name == "USER"]
    assert users
    assert re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", users[-1])
    names = [instruction.name for instruction in stages()[-1].steps]
    assert "RUN" not in names[names.index("USER") :]


def test_commands_are_in_exec_form_so_that_signals_arrive() -> None:
    for words in [*of("CMD"), *of("ENTRYPOINT")]:
        assert all(isinstance(word, str) for word in json.loads(words))
    (check,) = of("HEALTHCHECK")
    assert json.loads(check.partition("CMD ")[2])


def test_the_entry_point_is_the_command_and_its_default_is_one_that_it_has() -> None:
    (entry,), (command,) = of("ENTRYPOINT"), of("CMD")
    assert json.loads(entry) == ["fedpareto"]
    assert problem(shlex.join(["fedpareto", *json.loads(command)])) is None


def test_the_image_keeps_no_package_lists_caches_or_secrets() -> None:
    assert not of("ADD")
    for words in of("RUN"):
        if "apt-get install" in words:
            assert "--no-install-recommends" in words
            assert "rm -rf /var/lib/apt/lists/*" in words
        if "pip install" in words:
            assert "--no-cache-dir" in words
            assert "--constraint constraints.txt" in words
        assert not re.search(r"\bsudo\b|\bcurl\b|\bwget\b|--trusted-host|index-url", words)
    assert not [words for words in [*of("ENV"), *of("ARG")] if SECRET.search(words)]


def test_the_image_gets_every_package_and_what_it_copies_is_let_in() -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = [source for words in of("COPY") if not words.startswith("--from") for source in shlex.split(words)[:-1]]
    assert set(PACKAGES) <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in let_in, source


@pytest.mark.parametrize("package", PACKAGES)
def test_a_change_of_the_code_makes_no_layer_with_libraries_anew(package: str) -> None:
    libraries = [step for step in made_anew("constraints.txt") if re.search("--requirements |--from=libraries", step)]
    assert [step.split()[0] for step in libraries] == ["RUN", "COPY"], "they are installed, and copied into the image"
    anew = made_anew(f"{package}/errors.py")
    assert not set(libraries) & set(anew)
    assert "COPY --from=code /opt/code /opt/fedpareto" in anew


def test_an_image_has_the_extras_that_are_asked_for_and_always_preferences(tmp_path: Path) -> None:
    def installed(**arguments: str) -> str:
        *_, call = ran(tmp_path, **{"EXTRAS": "", "TORCH_BACKEND": "", **arguments})
        start, _, extras = call.partition(" --constraint constraints.txt ")
        assert start.startswith("uv pip install --python /opt/fedpareto ")
        return extras

    assert installed() == "--extra preference --requirements pyproject.toml"
    assert installed(EXTRAS="torch,objects", TORCH_BACKEND="cpu") == (
        "--torch-backend cpu --extra preference --extra torch --extra objects --requirements pyproject.toml"
    )


# --- compose.yaml


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return document


def ours() -> dict[str, Any]:
    return {name: service for name, service in compose()["services"].items() if "build" in service}


def test_compose_describes_postgresql_a_coordinator_and_three_workers() -> None:
    services = compose()["services"]
    assert [name for name, service in services.items() if str(service.get("image", "")).startswith("postgres:")]
    roles = [" ".join(service["command"][:2]) for service in ours().values()]
    assert sorted(roles) == ["coordinator serve", *["worker run"] * 3]


def test_compose_runs_only_commands_that_the_command_line_takes() -> None:
    found = {name: problem(shlex.join(["fedpareto", *service["command"]])) for name, service in ours().items()}
    assert not {name: why for name, why in found.items() if why}


def test_the_workers_of_compose_share_a_file_that_they_cannot_change_and_take_a_part_each(tmp_path: Path) -> None:
    path = tmp_path / "worker.toml"
    path.write_text((ROOT / "docker" / "worker.toml").read_text())
    file, parts = WorkerConfig.load(path), []
    for name, service in ours().items():
        if name.startswith("worker"):
            command, (_, mount) = service["command"], service["volumes"]
            assert mount == f"./docker/worker.toml:{command[command.index('--config') + 1]}:ro"
            parts.append(file.changed([command[command.index("--set") + 1]]).source.part)
    assert parts == [Part(number, 3, "shards:4") for number in range(3)]


def test_compose_pins_images_checks_health_and_restarts() -> None:
    own = PROJECT["project"]["version"]
    for name, service in compose()["services"].items():
        image = service["image"]
        assert re.fullmatch(rf"fedpareto:{re.escape(own)}(-torch-cpu)?", image) or IMAGE.fullmatch(image), name
        assert "build" in service or "healthcheck" in service, f"{name}: the image of fedpareto brings its own check"
        assert service["restart"] == "unless-stopped", name
        assert "privileged" not in service, name


def test_workers_have_torch_without_cuda_and_the_coordinator_has_none() -> None:
    for service in ours().values():
        wanted = {"EXTRAS": "torch", "TORCH_BACKEND": "cpu"} if service["command"][0] == "worker" else {}
        assert service["build"].get("args", {}) == wanted
        assert service["image"].endswith("-torch-cpu") == bool(wanted)


def test_containers_whose_processes_share_memory_have_more_of_it_than_the_usual_64_mb() -> None:
    given = {name: service.get("shm_size") for name, service in compose()["services"].items()}
    assert given == {"database": "256mb", "coordinator": None, **{f"worker-{number}": "1gb" for number in (1, 2, 3)}}


def test_our_containers_get_no_privileges_and_write_only_to_their_volumes() -> None:
    for name, service in ours().items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def test_compose_holds_no_secret() -> None:
    for name, service in compose()["services"].items():
        for key, value in service.get("environment", {}).items():
            if SECRET.search(key) and not key.endswith("_FILE"):
                assert re.fullmatch(r"\$\{\w+:\?[^}]+\}", value), f"{name}: {key} comes from outside, without a default"
        assert not [word for word in service.get("command", []) if re.search(r"://[^/@]*:[^/@]*@", word)], name


def test_only_the_coordinator_publishes_ports() -> None:
    assert [name for name, service in compose()["services"].items() if "ports" in service] == ["coordinator"]


def test_compose_names_only_what_it_declares() -> None:
    document = compose()
    for name, service in document["services"].items():
        assert set(service.get("depends_on", {})) <= set(document["services"]), name
        named = {volume.split(":")[0] for volume in service.get("volumes", []) if volume[0] not in "./"}
        assert named <= set(document["volumes"]), name
        assert set(service.get("secrets", [])) <= set(document.get("secrets", {})), name


def test_docker_compose_takes_the_file() -> None:
    docker = shutil.which("docker")
    if docker is None or ended(docker, "compose", "version").returncode:
        pytest.skip("docker compose is not installed here")
    environment: dict[str, Any] = {"PATH": "/usr/bin:/bin", "POSTGRES_PASSWORD": "only-for-this-test"}
    ended(docker, "compose", "--file", "compose.yaml", "config", "--quiet", code=0, **environment)


# --- the container's health check


def well(home: Path) -> bool:
    return ended(sys.executable, ROOT / "docker/healthcheck.py", home).returncode == 0


@pytest.mark.full
def test_a_coordinator_is_well_while_it_serves_and_no_longer(tmp_path: Path) -> None:
    with federation(tmp_path, "--host", "coordinator.example") as made:
        assert not well(made.home)
        coordinator = made.serve()
        assert well(made.home)
        coordinator.kill()
        assert not well(made.home)


def test_a_worker_is_well_while_a_process_holds_its_directory(tmp_path: Path) -> None:
    assert not well(tmp_path)
    with WorkerHome(tmp_path).lock():
        assert well(tmp_path)
    assert not well(tmp_path)
