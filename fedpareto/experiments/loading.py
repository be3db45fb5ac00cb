"""Finds experiments: in the catalogue of this package, in other packages (docs/research/plugins.md), and in files."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from federation.owners_code import described, passes
from federation.plugins import Offer, offers
from federation.text_files import EncodingError, read_text
from fedpareto.experiments.definition import Experiment, ExperimentError, parse
from fedpareto.experiments.published_numbers import CATALOGUE

GROUP = "fedpareto.experiments"


def plugins() -> tuple[Offer, ...]:
    """The experiments of other packages, without importing the packages."""
    built_in = _built_in()
    return tuple(offer for offer in offers(GROUP) if offer.name not in built_in)


def names() -> tuple[str, ...]:
    """The experiments of the catalogue, then those of other packages."""
    return (*_built_in(), *dict.fromkeys(offer.name for offer in plugins()))


def load(name: str) -> Experiment:
    """An experiment of the catalogue or of another package (`names`), or of a file, whose path ends in ".toml".

    Raises:
        ExperimentError: no such experiment, or its file is not valid; the message names each wrong key.
    """
    if name.endswith(".toml"):
        return _from_file(Path(name).stem, Path(name), Path(name).absolute().parent)
    if name in _built_in():
        return _from_file(name, CATALOGUE / f"{name}.toml", CATALOGUE)
    matching = [offer for offer in plugins() if offer.name == name]
    if not matching:
        there = f"there are {', '.join(names())}"
        raise ExperimentError(f"no experiment {name!r}: {there}; name a file of your own by its path, ./my.toml")
    if len(matching) > 1:
        several = f"several packages ({', '.join(offer.package for offer in matching)})"
        raise ExperimentError(f"experiment {name!r} comes with {several}: name its file by its path")
    module = matching[0].origin.partition(":")[0]
    try:
        place = files(module)
    except BaseException as error:  # the package's own code can raise anything
        if passes(error):
            raise
        raise ExperimentError(f"experiment {name!r}: importing {module} failed: {described(error)}") from error
    return _from_file(name, place / f"{name}.toml", place)


def _built_in() -> tuple[str, ...]:
    return tuple(sorted(item.name.removesuffix(".toml") for item in CATALOGUE.iterdir() if item.name.endswith(".toml")))


def _from_file(name: str, path: Traversable, place: Traversable) -> Experiment:
    try:
        return parse(name, read_text(path), place)
    except FileNotFoundError as error:
        raise ExperimentError(f"{path}: there is no file {error.filename}") from None
    except (OSError, EncodingError) as error:
        raise ExperimentError(f"{path} cannot be read: {error}") from None
