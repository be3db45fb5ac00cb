"""Texts that people write, as editors and shells of all systems save them: UTF-8, with a byte-order mark or not."""

import codecs
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

from federation.errors import Error

FORMAT: Final = 1  # of the TOML and JSON files in the directories of coordinators, members and administrators
_MARK = "\ufeff"
_OTHER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)  # that of UTF-32 LE begins like UTF-16's


class EncodingError(Error, ValueError):
    """A text is not UTF-8. The message says what it is, and what to do."""


class FormatError(Error, ValueError):
    """A file has a format that this version does not read; the message says which one."""


def check_format(value: Any) -> int:
    """The value of the key `format` of a file.

    It changes when a version cannot read the files of the one before; a new key with a default is no new format.

    Raises:
        FormatError: this version does not read the format.
    """
    if type(value) is not int or value != FORMAT:
        raise FormatError(f"this version of fedpareto reads format {FORMAT}; got {repr(value)[:40]}")
    return value


def read_text(path: Path | Traversable) -> str:
    """The text of a file, as `decoded` reads it.

    Raises:
        OSError: the file cannot be read.
        EncodingError: it is not UTF-8.
    """
    return decoded(path.read_bytes())


def decoded(data: bytes) -> str:
    """A text, without byte-order marks: files that were joined have one at the beginning of each.

    Raises:
        EncodingError: it is not UTF-8.
    """
    check_not_wide(data)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise EncodingError(
            f"it is not UTF-8 (byte 0x{data[error.start]:02x} in line {line}): save it as UTF-8"
        ) from None
    return unmarked(text)


def unmarked(text: str) -> str:
    """A text without the byte-order marks at the beginning of its lines."""
    return text.removeprefix(_MARK).replace(f"\n{_MARK}", "\n") if _MARK in text else text


def check_not_wide(data: bytes) -> None:
    """Raises EncodingError if a text has units of two bytes or more: with a byte-order mark, or from its zeros."""
    if data.startswith(_OTHER_MARKS) or b"\0" in data[:2]:
        raise EncodingError(
            "it is UTF-16, as > in PowerShell writes it: save it as UTF-8 (in PowerShell: Out-File -Encoding utf8)"
        )
