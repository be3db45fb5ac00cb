"""Samples that are not in memory: read from a map-style torch Dataset when they are needed, by a DataLoader.

The choice and the order of samples follow from the same seeds as for samples in memory.
"""

import copy
import multiprocessing
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import torch
import torch.utils.data
from torch import Tensor

from federation.owners_code import described, passes
from federation.tasks import DataError, Dataset, Loading, Splits
from federation.training.sample_tensors import as_tensor, splits_of_tensors
from federation.value_words import in_words
from federation.work.base import WorkError

_HERE = Loading()
_PAIR = 2
_Key = tuple[str, int]  # a split, and the index of a sample in it


class _Problem(str):
    """The reason why a sample cannot be used: a value, so that it arrives unchanged from other processes."""


class _Samples(torch.utils.data.Dataset[Any]):
    """The samples of all splits by split and index, checked against the shapes of the first one of its split."""

    def __init__(self, splits: Mapping[str, Any]) -> None:
        self._splits = splits
        self._shapes: dict[str, tuple[torch.Size, torch.Size]] = {}
        for name, split in splits.items():
            if len(split):
                first = self[name, 0]
                if isinstance(first, _Problem):
                    raise DataError(str(first))
                self._shapes[name] = (first[0].shape, first[1].shape)

    def __getitem__(self, key: _Key) -> "tuple[Tensor, Tensor] | _Problem":
        name, index = key
        name_of_sample = f"sample {index} of the {name} split"
        try:
            sample = self._splits[name][index]
            if isinstance(sample, Mapping) or len(sample) != _PAIR:
                return _Problem(f"{name_of_sample} is {in_words(sample)}; needed: a pair, its features and its label")
            x, y = map(_tensor, sample, ("its features", "its label"))
        except DataError as error:
            return _Problem(f"{name_of_sample}: {error}")
        except BaseException as error:
            if passes(error):
                raise
            return _Problem(f"{name_of_sample} cannot be read: {described(error)}")
        for noun, part in (("features", x), ("labels", y)):
            if part.is_floating_point() and not part.isfinite().all():
                return _Problem(f"{name_of_sample} has {noun} that are not finite")
        expected = self._shapes.get(name, (x.shape, y.shape))
        if (x.shape, y.shape) != expected:
            found, first = (f"{tuple(shapes[0])} and {tuple(shapes[1])}" for shapes in ((x.shape, y.shape), expected))
            return _Problem(
                f"{name_of_sample} has features and labels of the shapes {found}; those of sample 0 are {first}"
            )
        return x, y


def _tensor(part: Any, noun: str) -> Tensor:
    return torch.as_tensor(part) if isinstance(part, int | float | complex | list) else as_tensor(part, noun)


def _together(samples: Sequence["tuple[Tensor, Tensor] | _Problem"]) -> "tuple[Tensor, Tensor] | _Problem":
    pairs = []
    for sample in samples:
        if isinstance(sample, _Problem):
            return sample
        pairs.append(sample)
    xs, ys = zip(*pairs, strict=True)
    return torch.stack(xs), torch.stack(ys)


class _Batches:
    """The minibatches that a DataLoader reads next; a loader keeps its processes from one list to the next."""

    def __init__(self) -> None:
        self.keys: Sequence[Sequence[_Key]] = ()

    def __iter__(self) -> Iterator[Sequence[_Key]]:
        return iter(self.keys)

    def __len__(self) -> int:
        return len(self.keys)


class SampleReader:
    """Reads the samples of a client's splits.

    Args:
        splits: map-style data sets, whose items are pairs of features and labels.
        loading: the number of reading processes, and the kind of memory.

    Raises:
        DataError: the first sample of a split cannot be read.
    """

    def __init__(self, splits: Mapping[str, Any], loading: Loading) -> None:
        self._samples, self._loading, self._batches = _Samples(splits), loading, _Batches()
        self._loader: torch.utils.data.DataLoader[Any] | None = None

    def read(self, keys: Sequence[Sequence[_Key]], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of samples. A later call ends an earlier one.

        Raises:
            DataError: a sample cannot be used (the message names it), or a reading process has ended.
        """
        self._batches.keys = keys
        try:
            loaded = iter(self._open())
        except Exception as error:
            self.close()
            raise DataError(f"the data cannot be sent to the processes that read it: {error}") from error
        while True:
            try:
                batch = next(loaded, None)
            except RuntimeError as error:
                self.close()
                raise DataError(f"a process that reads the data has ended: {str(error).splitlines()[0]}") from error
            if batch is None:
                return
            if isinstance(batch, _Problem):
                raise DataError(str(batch))
            x, y = batch
            yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    def close(self) -> None:
        """Ends the reading processes."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:  # each process takes 5 seconds to end if the garbage collector finds it later
            iterator._shutdown_workers()
        self._loader = None

    def _open(self) -> "torch.utils.data.DataLoader[Any]":
        if self._loader is None:
            workers, pin = self._loading.workers, self._loading.pin and torch.cuda.is_available()
            context = None
            if workers:
                # A fork of a worker could wait forever for locks of gRPC's threads.
                context = multiprocessing.get_context("forkserver" if sys.platform != "win32" else "spawn")
                with suppress(AttributeError):
                    context.set_forkserver_preload(["torch"])
            self._loader = torch.utils.data.DataLoader(
                self._samples,
                batch_sampler=self._batches,  # type: ignore[arg-type]
                collate_fn=_together,
                num_workers=workers,
                pin_memory=pin,
                persistent_workers=workers > 0,
                multiprocessing_context=context,
                generator=torch.Generator(),  # a separate one: the model draws from torch's generator
            )
        return self._loader


class StoredSamples:
    """The samples of one split, which are read when they are needed."""

    def __init__(self, reader: SampleReader, name: str, count: int) -> None:
        self._reader, self._name, self._count = reader, name, count
        self.device = torch.device("cpu")

    def __len__(self) -> int:
        return self._count

    def on(self, device: torch.device) -> "StoredSamples":
        """A copy for a model on this device."""
        other = copy.copy(self)
        other.device = device
        return other

    def must_be_read(self, size: int) -> None:
        """Raises WorkError if minibatches of this size are the whole split, whatever its size."""
        if size == 0:
            raise WorkError(
                f"a minibatch of the whole {self._name} split (batch_size = 0), and this worker's {self._count} "
                "samples are not in memory: give a number",
                reason="whole-split",
            )

    def minibatches(self, size: int, seed: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """As `federation.training.sgd.minibatches`; the first `count`, and no other samples are read."""
        self.must_be_read(size)
        generator = torch.Generator().manual_seed(seed)
        while count > 0:
            whole = size >= self._count
            order = torch.arange(self._count) if whole else torch.randperm(self._count, generator=generator)
            batches = torch.split(order, size)[:count]
            count -= len(batches)
            yield from self._read(batches)

    def in_order(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All samples, in batches."""
        return self._read(torch.split(torch.arange(self._count), size))

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Some samples."""
        return next(self._read([index.cpu()]))

    def close(self) -> None:
        """Ends the reading processes."""
        self._reader.close()

    def _read(self, batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        return self._reader.read([[(self._name, index) for index in batch.tolist()] for batch in batches], self.device)


def with_stored(splits: Splits, loading: Loading = _HERE) -> Splits:
    """The same splits, with `StoredSamples` in place of map-style data sets, and tensors in place of arrays.

    Raises:
        DataError: these are no splits, a split is neither in memory nor map-style, samples in memory are no numbers, or
            the first sample of a map-style data set cannot be read.
    """
    splits = splits_of_tensors(splits)
    given = {item.name: getattr(splits, item.name) for item in fields(splits)}
    stored = {name: split for name, split in given.items() if not isinstance(split, Dataset | StoredSamples)}
    for name, split in stored.items():
        if not (hasattr(split, "__getitem__") and hasattr(split, "__len__")) or isinstance(split, tuple | Mapping):
            raise DataError(
                f"the {name} split is {in_words(split)}; it must be a Dataset of fedpareto or a map-style one of "
                "torch, with a length"
            )
    if not stored:
        return splits
    reader = SampleReader(stored, loading)
    return replace(splits, **{name: StoredSamples(reader, name, len(split)) for name, split in stored.items()})
