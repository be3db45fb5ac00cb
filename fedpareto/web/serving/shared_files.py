"""The files that the pages of both consoles load: style sheets and the icon."""

from importlib.resources import files

from fedpareto.web.pages.skeleton import STYLE


def shared_files() -> dict[str, tuple[bytes, str]]:
    """The files by name, with their media types."""
    place, css = files("fedpareto.web.serving").joinpath("static"), "text/css; charset=utf-8"
    return {
        "icon.svg": (place.joinpath("icon.svg").read_bytes(), "image/svg+xml"),
        "console.css": (place.joinpath("console.css").read_bytes(), css),
        "style.css": (STYLE.encode(), css),
    }
