"""Generates federation/v1 from proto/ for `make proto`; a test compares its output with the committed files."""

import shutil
import sys
import sysconfig
from pathlib import Path

from grpc_tools import protoc

PROTO = Path(__file__).resolve().parent


def generate(out: Path) -> None:
    """Writes the Python stubs of every .proto file, with type hints, below `out`.

    Raises:
        RuntimeError: protoc failed; its message is on stderr.
    """
    scripts = Path(sysconfig.get_path("scripts"))
    well_known = Path(protoc.__file__).parent / "_proto"
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"-I{PROTO}",
            f"-I{well_known}",
            f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out={out}",
            f"--mypy_grpc_out={out}",
            *sources,
        ]
    )
    if status:
        raise RuntimeError(f"protoc ended with status {status}")
    for name in ("common", "secure", "record"):  # define no service
        for empty in out.rglob(f"{name}_pb2_grpc.py*"):
            empty.unlink()


if __name__ == "__main__":
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else PROTO.parent
    shutil.rmtree(root / "federation/v1/__pycache__", ignore_errors=True)
    generate(root)
