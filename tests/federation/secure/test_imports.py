"""What `federation.secure` may import: no random generator, no messages, no network, no storage, no PyTorch."""

import ast
from pathlib import Path

import federation.secure

FILES = sorted(Path(federation.secure.__file__).parent.glob("*.py"))
ALLOWED = {
    "blake3",
    "collections",
    "cryptography",
    "dataclasses",
    "enum",
    "federation",
    "fractions",
    "itertools",
    "math",
    "numpy",
    "statistics",
    "typing",
}
PRIMITIVES = {
    "cryptography.exceptions",
    "cryptography.hazmat.primitives.asymmetric.x25519",
    "cryptography.hazmat.primitives.ciphers",
    "cryptography.hazmat.primitives.ciphers.aead",
    "cryptography.hazmat.primitives.ciphers.algorithms",
    "cryptography.hazmat.primitives.ciphers.modes",
    "cryptography.hazmat.primitives.hashes",
    "cryptography.hazmat.primitives.kdf.hkdf",
    "numpy",
    "numpy.typing",
}
GENERATORS = {
    "random",
    "default_rng",
    "Generator",
    "RandomState",
    "urandom",
    "token_bytes",
    "generate",
    "getrandbits",
    "seed",
}


def modules(source: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(source)))
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return named | {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}


def problems(source: str) -> list[str]:
    """Imports that are not allowed, and names of random generators that are read or called."""
    found = []
    for module in sorted(modules(source)):
        root = module.split(".")[0]
        if root not in ALLOWED or (root == "federation" and not module.startswith("federation.secure")):
            found.append(module)
        if root in ("cryptography", "numpy") and module not in PRIMITIVES:
            found.append(module)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in GENERATORS:
            found.append(node.attr)
        if isinstance(node, ast.Name) and node.id in {"__import__", "eval", "exec", "open", "getattr"}:
            found.append(node.id)
        if isinstance(node, ast.ImportFrom) and node.module == "numpy" and {a.name for a in node.names} & GENERATORS:
            found.append("numpy's generator")
    return found


def test_no_module_imports_or_calls_a_random_generator_or_anything_else_than_primitives() -> None:
    assert len(FILES) > 15
    assert {path.name: problems(path.read_text()) for path in FILES} == {path.name: [] for path in FILES}


def test_the_search_finds_generators() -> None:
    for line in (
        "import random",
        "import secrets",
        "from os import urandom",
        "import numpy as np\nnp.random.default_rng(0)",
        "from numpy import random",
        "from numpy.random import default_rng",
        "from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey\nX25519PrivateKey.generate()",
        "__import__('random')",
        "import torch",
        "from federation.v1 import common_pb2",
        "from cryptography.fernet import Fernet",
    ):
        assert problems(line), line
