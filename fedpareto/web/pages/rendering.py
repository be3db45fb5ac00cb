"""Pages from templates, which escape every text that is not HTML already."""

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined

from fedpareto.web.pages.html import Html


def environment(*packages: str) -> Environment:
    """The templates of these packages, each in its folder `templates`."""
    places = (item for package in packages for item in files(package).joinpath("templates").iterdir())
    texts = {item.name: item.read_text("utf-8") for item in places if item.name.endswith(".html")}
    return Environment(
        autoescape=True, loader=DictLoader(texts), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


@cache
def _shared() -> Environment:
    return environment("fedpareto.web.pages")


def rendered(template: str, **values: Any) -> Html:
    """A template that all rooms share, with these values."""
    return Html(_shared().get_template(template).render(values))
