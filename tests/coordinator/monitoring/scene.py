"""Scrapes of a coordinator."""

import urllib.request
from functools import lru_cache

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]


def scraped(port: int, token: str = "") -> str:
    """The page of `/metrics`."""
    fields = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=fields)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.read().decode())


@lru_cache(maxsize=4)  # a test asks for many values of one page
def samples(page: str) -> dict[tuple[str, Labels], float]:
    """The values on a page, by name and labels."""
    families = text_string_to_metric_families(page)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(page: str, name: str, **labels: str) -> float | None:
    """One value; None if the page has no such series."""
    return samples(page).get((name, tuple(sorted(labels.items()))))
