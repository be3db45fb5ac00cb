"""The container's health check: exit code 0 if the coordinator or worker of the given home directory works.

A coordinator must answer on its enrollment port, with a valid certificate, that it serves; with --answers it need not
serve, as while its database is away. A worker has no port; it is healthy while a
process holds the lock of its home, even if it cannot reach the coordinator.
"""

import fcntl
import json
import sys
import tomllib
from pathlib import Path

ANSWER_SECONDS = 5.0


def coordinator_serves(home: Path, *, answers: bool) -> bool:
    """Whether the coordinator of this home answers that it serves; whether it answers at all with `answers`."""
    import grpc  # noqa: PLC0415 - not needed for a worker
    from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse  # noqa: PLC0415
    from grpc_health.v1.health_pb2_grpc import HealthStub  # noqa: PLC0415

    from federation.text_files import read_text  # noqa: PLC0415
    from federation.transport.channels import server_verified_channel  # noqa: PLC0415

    settings = tomllib.loads(read_text(home / "coordinator.toml"))
    host = settings.get("enrollment_host") or settings["hosts"][0]
    try:
        port = json.loads((home / "ports.json").read_text())["enrollment"]
        name = [("grpc.ssl_target_name_override", host)]
        with server_verified_channel(f"127.0.0.1:{port}", (home / "ca.pem").read_bytes(), name) as channel:
            answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=ANSWER_SECONDS)
    except (OSError, grpc.RpcError) as error:
        print(f"the coordinator does not answer: {error}", file=sys.stderr)  # noqa: T201
        return False
    return answers or bool(answer.status == HealthCheckResponse.SERVING)


def worker_lives(home: Path) -> bool:
    """Whether a process holds the lock of this worker's home."""
    try:
        with (home / "worker.lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    print(f"no worker runs with {home}", file=sys.stderr)  # noqa: T201
    return False


def main(home: Path, *, answers: bool = False) -> int:
    """The exit code: 0 or 1."""
    is_coordinator = (home / "coordinator.toml").is_file()
    healthy = coordinator_serves(home, answers=answers) if is_coordinator else worker_lives(home)
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[-1]), answers="--answers" in sys.argv[1:-1]))
