"""Writes a software bill of materials: what an environment has installed, in CycloneDX's JSON. `make sbom` starts it.

    python tools/sbom.py [--out FILE]

Without --out it goes to build/fedpareto-VERSION.cdx.json.
"""

import argparse
from collections.abc import Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.utils import canonicalize_name

PRODUCT = "fedpareto"
ROOT = Path(__file__).resolve().parent.parent


def bill_of_materials(installed: Sequence[Distribution]) -> Bom:
    """The parts of an environment; its subject is fedpareto. Raises LookupError if that is not among them."""
    bom = Bom()
    for package in installed:
        name = canonicalize_name(package.metadata["Name"])
        own = name == PRODUCT
        part = Component(
            type=ComponentType.APPLICATION if own else ComponentType.LIBRARY,
            name=name,
            version=package.version,
            bom_ref=f"{name}@{package.version}",
            purl=PackageURL("pypi", name=name, version=package.version),
        )
        if own:
            bom.metadata.component = part
        else:
            bom.components.add(part)
    root = bom.metadata.component
    if root is None:
        raise LookupError(f"{PRODUCT} is not among the {len(installed)} installed packages")
    bom.register_dependency(root, bom.components)
    return bom


def write(bom: Bom, target: Path) -> str:
    """Writes a bill, and returns in words what was written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(JsonV1Dot6(bom).output_as_string(indent=2) + "\n")
    return f"{target.name}, {len(bom.components)} components"


def main() -> None:
    """Writes the bill of the environment that runs this."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="the file to write")
    options = parser.parse_args()
    bom = bill_of_materials(list(distributions()))
    version = bom.metadata.component.version if bom.metadata.component is not None else ""
    print(write(bom, options.out or ROOT / "build" / f"{PRODUCT}-{version}.cdx.json"))


if __name__ == "__main__":
    main()
