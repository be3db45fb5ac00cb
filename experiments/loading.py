"""Where experiments are: the catalogue of this package, those of other packages, and files.

Another package brings an experiment by an entry point of the group `fedpareto.experiments`. Its name is the
experiment's, its value the package that holds the file NAME.toml and the CSV files that this names:

    [project.entry-points."fedpareto.experiments"]
    fair-digits = "my_package.experiments"
"""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from experiments.definition import Experiment, ExperimentError, parse
from experiments.published import CATALOGUE
from federation.owners_code import described
from federation.plugins import Offer, offers

GROUP = "fedpareto.experiments"


def plugins() -> tuple[Offer, ...]:
    """The experiments of other packages, by name. Nothing is imported."""
    built_in = _built_in()
    return tuple(offer for offer in offers(GROUP) if offer.name not in built_in)


def names() -> tuple[str, ...]:
    """The experiments of the catalogue, then those of other packages."""
    return (*_built_in(), *dict.fromkeys(offer.name for offer in plugins()))


def load(name: str) -> Experiment:
    """An experiment of the catalogue, of another package, or of a file.

    Args:
        name: one of `names`; or the path of a file, which ends in ".toml".

    Raises:
        ExperimentError: no such experiment, or a file that is wrong; each wrong key is named.
    """
    if name.endswith(".toml"):
        return _from_file(Path(name).stem, Path(name), Path(name).absolute().parent)
    if name in _built_in():
        return _from_file(name, CATALOGUE / f"{name}.toml", CATALOGUE)
    found = [offer for offer in plugins() if offer.name == name]
    if not found:
        raise ExperimentError(
            f"no experiment {name!r}: there are {', '.join(names())}; name a file of your own by its path, ./my.toml"
        )
    if len(found) > 1:
        packages = ", ".join(offer.package for offer in found)
        raise ExperimentError(
            f"experiment {name!r} comes with several packages ({packages}): name its file by its path"
        )
    place = _directory(found[0])
    return _from_file(name, place / f"{name}.toml", place)


def _built_in() -> tuple[str, ...]:
    return tuple(sorted(item.name.removesuffix(".toml") for item in CATALOGUE.iterdir() if item.name.endswith(".toml")))


def _directory(offer: Offer) -> Traversable:
    """The directory of the package that an entry point names."""
    module = offer.origin.partition(":")[0]
    try:
        return files(module)
    except (Exception, SystemExit) as error:  # whatever the package's own code raises
        raise ExperimentError(f"experiment {offer.name!r}: importing {module} failed: {described(error)}") from error


def _from_file(name: str, path: Traversable, place: Traversable) -> Experiment:
    try:
        return parse(name, path.read_text(encoding="utf-8"), place)
    except FileNotFoundError as error:
        missing = error.filename if error.filename != str(path) else path
        raise ExperimentError(f"{path}: there is no file {missing}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ExperimentError(f"{path} cannot be read: {error}") from None
