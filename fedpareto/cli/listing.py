"""Lists that come in pages, put together."""

from collections.abc import Callable
from typing import Any, TypeVar

ResponseT = TypeVar("ResponseT")


def whole(call: Callable[[Any], ResponseT], request: Any) -> ResponseT:
    """Every page of a list as one answer.

    Args:
        call: an rpc of the Admin service whose request and answer have page tokens.
        request: for the first page.
    """
    found: Any = call(request)
    while found.next_page_token:
        request.page_token = found.next_page_token
        page: Any = call(request)
        if "run" in page.DESCRIPTOR.fields_by_name:
            page.ClearField("run")  # each page repeats it
        found.next_page_token = ""
        found.MergeFrom(page)
    return found  # type: ignore[no-any-return]
