"""`shakespeare`: the next character of a play. The natural owners are the speaking roles.

Windows of 80 characters and the 80 symbols of LEAF (Caldas et al. 2018), as in FedMGDA+ section 6.3. The texts differ
from LEAF's, and so do the roles and their sizes: the Moby text (public domain), as MIT's Complete Works has it, or tiny
Shakespeare by A. Karpathy.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from federation.tasks import DataError, DataSource, Pool
from federation.tasks.published import Published
from federation.tasks.published_files import found, lines

SYMBOLS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
SPEECHES = "shakespeare/mit_shakespeare_speeches.jsonl"
TINY = "shakespeare/tinyshakespeare.txt"

_CODES = {symbol: code for code, symbol in enumerate(SYMBOLS)}
_UNKNOWN = _CODES[" "]


class Shakespeare(Published):
    """Complete a role's speeches. `--data DIR` reads all plays from DIR/shakespeare, or else the tiny selection.

    That is mit_shakespeare_speeches.jsonl (a JSON object with `play`, `speaker` and `text` on a line) or
    tinyshakespeare.txt (`SPEAKER:` and a speech, parted by empty lines); both may be packed (.gz).

    Attributes:
        length: characters in a window.
        least: a role of fewer windows is left out.
        most: windows of a role that are kept, from its first speech on; a long role would have 61,000.
        held: the share of a role's windows, the last ones, that are its test part.
    """

    length: ClassVar[int] = 80
    least: ClassVar[int] = 64
    most: ClassVar[int] = 4000
    held: ClassVar[float] = 0.2
    network = "CharacterLstm"
    files = f"{SPEECHES} or {TINY}"

    def pool(self, source: DataSource) -> Pool:
        """Windows of symbols, uint8 (n, 80), each with the symbol that follows, (n,); all windows of a role in order.

        A test window's last characters may have been trained on, but never what follows it. The owners are the roles,
        in alphabetical order.
        """
        directory = self.directory(source)
        speeches, tiny = directory / SPEECHES, directory / TINY
        roles = _tiny(tiny) if found(tiny) and not found(speeches) else _speeches(speeches)
        texts = {name: self._encode(parts) for name, parts in sorted(roles.items())}
        texts = {name: text for name, text in texts.items() if len(text) - self.length >= self.least}
        if not texts:
            raise DataError(f"no role in {directory / 'shakespeare'} has {self.least + self.length} characters")
        ends = {name: len(text) - round((len(text) - self.length) * self.held) for name, text in texts.items()}
        test = self._windows({name: text[ends[name] - self.length :] for name, text in texts.items()})
        return self._windows({name: text[: ends[name]] for name, text in texts.items()}, test)

    def _encode(self, speeches: Iterable[str]) -> NDArray[np.uint8]:
        text = "\n".join(speeches)[: self.length + self.most]
        return np.array([_CODES.get(character, _UNKNOWN) for character in text], dtype=np.uint8)

    def _windows(self, texts: dict[str, NDArray[np.uint8]], test: Pool | None = None) -> Pool:
        """Every window of every text that has a successor."""
        import torch  # noqa: PLC0415

        counts = [len(text) - self.length for text in texts.values()]
        x = np.empty((sum(counts), self.length), np.uint8)
        begin = 0
        for text, count in zip(texts.values(), counts, strict=True):
            x[begin : begin + count] = np.lib.stride_tricks.sliding_window_view(text[:-1], self.length)
            begin += count
        y = np.concatenate([text[self.length :] for text in texts.values()]).astype(np.int64)
        owner = np.repeat(np.arange(len(texts)), counts)
        return Pool(torch.from_numpy(x), torch.from_numpy(y), owners=tuple(texts), owner=owner, test=test)


def _speeches(path: Path) -> dict[str, list[str]]:
    """The speeches of each role of each play, by "play/SPEAKER"."""
    wanted = f'expected a speech on a line, as {{"play": ..., "speaker": ..., "text": ...}}, or {Path(TINY).name}'
    roles: dict[str, list[str]] = {}
    for number, line in lines(path, wanted):
        if not line:
            continue
        try:
            speech = json.loads(line)
            play, speaker, text = (speech[key] for key in ("play", "speaker", "text"))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}, line {number}: {error}; {wanted}") from error
        if not all(isinstance(value, str) for value in (play, speaker, text)):
            raise DataError(f"{path}, line {number}: not all three are texts; {wanted}")
        roles.setdefault(f"{play}/{speaker}", []).append(text)
    return roles


def _tiny(path: Path) -> dict[str, list[str]]:
    """The speeches of each speaker, named by a line that ends with a colon, after an empty line or at the beginning."""
    wanted = "expected `SPEAKER:`, the speech on the next lines, and an empty line before the next speaker"
    roles: dict[str, list[str]] = {}
    speech: list[str] | None = None
    fresh = True
    for number, line in lines(path, wanted):
        if fresh and line.endswith(":"):
            speech = roles.setdefault(line[:-1], [])
            speech.append("")
        elif line and speech is None:
            raise DataError(f"{path}, line {number}: {line[:40]!r} has no speaker; {wanted}")
        elif line and speech is not None:
            speech[-1] += "\n" + line if speech[-1] else line
        fresh = not line
    return roles
