"""The container's health check: exit code 0 when the process in the given directory does its work.

A coordinator is asked over its enrollment port, with its certificate verified. A worker listens nowhere; it is well
while a living process holds its directory. That it cannot reach the coordinator is not its illness.
"""

import fcntl
import json
import sys
import tomllib
from pathlib import Path

ANSWER_SECONDS = 5.0


def coordinator_serves(home: Path) -> bool:
    """Whether the coordinator of this directory says that it serves."""
    import grpc  # noqa: PLC0415 - a worker's check does without
    from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse  # noqa: PLC0415
    from grpc_health.v1.health_pb2_grpc import HealthStub  # noqa: PLC0415

    from federation.channels import server_verified_channel  # noqa: PLC0415

    host = tomllib.loads((home / "coordinator.toml").read_text())["hosts"][0]
    try:
        port = json.loads((home / "ports.json").read_text())["enrollment"]
        name = [("grpc.ssl_target_name_override", host)]
        with server_verified_channel(f"127.0.0.1:{port}", (home / "ca.pem").read_bytes(), name) as channel:
            answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=ANSWER_SECONDS)
    except (OSError, grpc.RpcError) as error:
        print(f"the coordinator does not answer: {error}", file=sys.stderr)  # noqa: T201
        return False
    return bool(answer.status == HealthCheckResponse.SERVING)


def worker_lives(home: Path) -> bool:
    """Whether a process holds the worker's directory."""
    try:
        with (home / "worker.lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    print(f"no worker runs with {home}", file=sys.stderr)  # noqa: T201
    return False


def main(home: Path) -> int:
    """The exit code: 0 or 1."""
    well = coordinator_serves(home) if (home / "coordinator.toml").is_file() else worker_lives(home)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
