"""The manifests in `deploy/`: what kustomize makes of them, without a cluster."""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.home import CoordinatorHome
from fedpareto import __version__
from tests.coordinator.backups.scene import NOWHERE, source
from tests.paths import ROOT
from tests.project.scene import ended
from tests.running import command
from worker.config import WorkerConfig

KUBECTL = Path(sys.executable).with_name("kubectl")
KUSTOMIZATIONS = ("coordinators", "public", "worker")
HOME = "/var/lib/fedpareto/home"
Manifest = dict[str, Any]


@pytest.fixture(scope="module")
def rendered() -> Mapping[str, list[Manifest]]:
    """The manifests of each kustomization."""

    def made(name: str) -> list[Manifest]:
        return list(yaml.safe_load_all(ended(KUBECTL, "kustomize", ROOT / "deploy" / name, code=0).stdout))

    return {name: made(name) for name in KUSTOMIZATIONS}


def one(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    [manifest] = [each for each in manifests if each["kind"] == kind and each["metadata"]["name"].startswith(name)]
    return manifest


def pods(rendered: Mapping[str, list[Manifest]]) -> Iterator[Manifest]:
    """The specification of each pod."""
    for manifests in rendered.values():
        yield from (each["spec"]["template"]["spec"] for each in manifests if each["kind"] == "StatefulSet")


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod["initContainers"], *pod["containers"]]


@pytest.fixture(scope="module")
def kubernetes() -> Any:
    """The schemas of Kubernetes. They are imported here, since the other processes that run tests do not need them."""
    import kubernetes_validate

    return kubernetes_validate


def test_every_manifest_is_as_the_schemas_of_kubernetes_say(
    rendered: Mapping[str, list[Manifest]], kubernetes: Any
) -> None:
    for manifests in rendered.values():
        for manifest in manifests:
            kubernetes.validate(manifest, "1.37", strict=True)


def test_a_misspelt_key_does_not_pass(rendered: Mapping[str, list[Manifest]], kubernetes: Any) -> None:
    manifest = one(rendered["coordinators"], "PodDisruptionBudget", "coordinator")
    wrong = {**manifest, "spec": {**manifest["spec"], "maxUnavailible": 1}}
    with pytest.raises(kubernetes.ValidationError, match="maxUnavailible"):
        kubernetes.validate(wrong, "1.37", strict=True)


def test_no_container_has_rights_that_it_does_not_need(rendered: Mapping[str, list[Manifest]]) -> None:
    for pod in pods(rendered):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
        writable = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume} | {"directory"}
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in container["resources"]["limits"]
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            mounts = {mount["name"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
            assert mounts["tmp"] is False
            assert {name for name, read_only in mounts.items() if not read_only} <= writable
            assert container["image"] in (f"fedpareto:{__version__}", f"fedpareto:{__version__}-torch")


def test_policies_budget_and_services_select_the_pods_that_they_are_for(
    rendered: Mapping[str, list[Manifest]],
) -> None:
    for name, component in {"coordinators": "coordinator", "worker": "worker"}.items():
        labels = {"app.kubernetes.io/name": "fedpareto", "app.kubernetes.io/component": component}
        manifests = rendered[name]
        pod = one(manifests, "StatefulSet", component)["spec"]["template"]
        assert labels.items() <= pod["metadata"]["labels"].items()
        assert one(manifests, "NetworkPolicy", component)["spec"]["podSelector"] == {"matchLabels": labels}
        assert one(manifests, "Service", component)["spec"]["selector"] == labels
    budget = one(rendered["coordinators"], "PodDisruptionBudget", "coordinator")["spec"]
    assert budget["selector"]["matchLabels"]["app.kubernetes.io/component"] == "coordinator"
    assert (
        one(rendered["coordinators"], "StatefulSet", "coordinator")["spec"]["replicas"] - budget["maxUnavailable"] == 2
    )
    assert "ingress" not in one(rendered["worker"], "NetworkPolicy", "worker")["spec"]
    worker = one(rendered["worker"], "StatefulSet", "worker")["spec"]["template"]["spec"]["containers"][0]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_a_worker_has_shared_memory_for_the_processes_that_read_data(rendered: Mapping[str, list[Manifest]]) -> None:
    pod = one(rendered["worker"], "StatefulSet", "worker")["spec"]["template"]["spec"]
    (name,) = [mount["name"] for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    (volume,) = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == name]
    assert volume == {"medium": "Memory", "sizeLimit": "1Gi"}


def test_the_file_of_a_worker_is_on_a_read_only_mount_and_names_the_mounted_data(
    rendered: Mapping[str, list[Manifest]], tmp_path: Path
) -> None:
    pod = one(rendered["worker"], "StatefulSet", "worker")["spec"]["template"]["spec"]
    [serving], path = pod["containers"], tmp_path / "worker.toml"
    settings = one(rendered["worker"], "ConfigMap", "worker-settings")
    path.write_text(settings["data"]["worker.toml"])
    file, mounts = WorkerConfig.load(path), {mount["name"]: mount for mount in serving["volumeMounts"]}
    assert (file.tasks, file.data) == (("fashion-mnist",), mounts["data"]["mountPath"])
    [volume] = [volume for volume in pod["volumes"] if "configMap" in volume]
    assert volume["configMap"]["name"] == settings["metadata"]["name"]
    assert mounts[volume["name"]]["readOnly"] is True
    given = serving["args"][serving["args"].index("--config") + 1]
    assert given == f"{mounts[volume['name']]['mountPath']}/worker.toml"


@pytest.mark.full
def test_a_pod_makes_the_directory_of_its_coordinator_once_from_the_secret_and_under_its_own_name(
    rendered: Mapping[str, list[Manifest]], tmp_path: Path
) -> None:
    keys, home = source(tmp_path / "keys", database=NOWHERE, blobs="s3://bucket/prefix"), tmp_path / "home"
    settings = one(rendered["public"], "ConfigMap", "coordinator-settings")["data"]
    pod = one(rendered["public"], "StatefulSet", "coordinator")["spec"]["template"]["spec"]
    [setup], [serving] = pod["initContainers"], pod["containers"]
    script = setup["args"][0].replace("/keys", str(keys)).replace(HOME, str(home))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**settings, "POD_NAME": "coordinator-2", "PATH": path}
    home.mkdir()
    (home / "ca.key").touch()  # of a copy that was interrupted

    ended(*setup["command"], script, code=0, **environment)
    made = CoordinatorHome.load(home)
    assert made.settings.hosts == ("coordinator-2.fl.example.org",)
    assert made.settings.bind == "0.0.0.0"
    assert made.settings.database == settings["FEDPARETO_DATABASE"]
    ports = {port["name"]: port["containerPort"] for port in serving["ports"]}
    assert ports == {"federation": made.settings.federation_port, "enrollment": made.settings.enrollment_port}

    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    ended(*setup["command"], script, code=0, **environment)
    assert before == {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}


def test_services_and_pods_of_coordinators_have_the_same_names(rendered: Mapping[str, list[Manifest]]) -> None:
    coordinators = one(rendered["public"], "StatefulSet", "coordinator")["spec"]
    one(rendered["public"], "Service", coordinators["serviceName"])
    for number in range(coordinators["replicas"]):
        service = one(rendered["public"], "Service", f"coordinator-{number}")["spec"]
        assert service["selector"] == {"statefulset.kubernetes.io/pod-name": f"coordinator-{number}"}
    domain = one(rendered["coordinators"], "ConfigMap", "coordinator-settings")["data"]["DOMAIN"]
    namespace = one(rendered["coordinators"], "Service", "coordinators")["metadata"]["namespace"]
    assert domain == f"{coordinators['serviceName']}.{namespace}.svc.cluster.local"


def test_what_the_containers_run_are_commands_of_this_version(rendered: Mapping[str, list[Manifest]]) -> None:
    for pod in pods(rendered):
        [serving] = pod["containers"]
        options = [word for word in serving["args"] if word.startswith("--")]
        usage = command(*serving["args"][:2], "--help", columns=200).stdout
        assert all(option in usage for option in options)
        for probe in ("startupProbe", "livenessProbe"):
            assert serving[probe]["exec"]["command"][:2] == ["python", "/opt/fedpareto/healthcheck.py"]
