"""Samples that are not in memory: read from a map-style torch Dataset when they are needed, by a DataLoader.

The choice and the order of samples follow from the same seeds as for samples in memory.
"""

import copy
import errno
import multiprocessing
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.utils.data
from numpy.typing import NDArray
from torch import Tensor

from federation.owners_code import described, passes, place
from federation.process.sockets import short_enough
from federation.tasks import DataError, Dataset, Loading, Splits
from federation.text import counted
from federation.training import shared_memory
from federation.training.sample_tensors import as_tensor, splits_of_tensors
from federation.value_words import in_words
from federation.work.base import WorkError
from federation.work.minibatch_sizes import Cut

_HERE = Loading()
_PAIR = 2
_Key = tuple[str, int]  # a split, and the index of a sample in it
_Batch = tuple[Tensor, Tensor]
_Packed = tuple[NDArray[np.uint8], torch.dtype, torch.Size]  # a tensor's bytes; NumPy does not have every type
SILENCE = 300.0  # seconds without a batch after which a pass ends; to start processes and read a batch takes far less
_LOOK = 5.0  # seconds until PyTorch looks if the processes still run, and says that it has waited for so long
_TIMED_OUT = "DataLoader timed out"


@dataclass(frozen=True)
class _Problem:
    """The reason why a sample cannot be used: a value, so that it arrives unchanged from other processes.

    Attributes:
        message: for the owner.
        wire: for others, who do not see which sample it is.
    """

    message: str
    wire: str

    def error(self) -> DataError:
        return DataError(self.message, wire=self.wire)


class _Samples(torch.utils.data.Dataset[Any]):
    """The samples of all splits by split and index, checked against the shapes of the first one of its split."""

    def __init__(self, splits: Mapping[str, Any]) -> None:
        self._splits = splits
        self._shapes: dict[str, tuple[torch.Size, torch.Size]] = {}
        self.part_bytes: dict[str, tuple[int, int]] = {}  # of the features and labels of a sample, by split
        for name, split in splits.items():
            if len(split):
                first = self[name, 0]
                if isinstance(first, _Problem):
                    raise first.error()
                self._shapes[name] = (first[0].shape, first[1].shape)
                self.part_bytes[name] = (first[0].nbytes, first[1].nbytes)

    def __getitem__(self, key: _Key) -> "_Batch | _Problem":
        name, index = key
        name_of_sample, any_sample = f"sample {index} of the {name} split", f"a sample of the {name} split"
        try:
            sample = self._splits[name][index]
            if isinstance(sample, Mapping) or len(sample) != _PAIR:
                needed = "needed: a pair, its features and its label"
                return _Problem(
                    f"{name_of_sample} is {in_words(sample)}; {needed}", f"{any_sample} is no pair; {needed}"
                )
            x, y = map(_tensor, sample, ("its features", "its label"))
        except DataError as error:
            return _Problem(f"{name_of_sample}: {error}", f"{any_sample} is no numbers: {place(error)}")
        except BaseException as error:
            if passes(error):
                raise
            return _Problem(
                f"{name_of_sample} cannot be read: {described(error)}", f"{any_sample} cannot be read: {place(error)}"
            )
        for noun, part in (("features", x), ("labels", y)):
            if part.is_floating_point() and not part.isfinite().all():
                problem = f"has {noun} that are not finite"
                return _Problem(f"{name_of_sample} {problem}", f"{any_sample} {problem}")
        expected = self._shapes.get(name, (x.shape, y.shape))
        if (x.shape, y.shape) != expected:
            found, first = (f"{tuple(shapes[0])} and {tuple(shapes[1])}" for shapes in ((x.shape, y.shape), expected))
            return _Problem(
                f"{name_of_sample} has features and labels of the shapes {found}; those of sample 0 are {first}",
                f"{any_sample} has another shape than the first",
            )
        return x, y


def _tensor(part: Any, noun: str) -> Tensor:
    return torch.as_tensor(part) if isinstance(part, int | float | complex | list) else as_tensor(part, noun)


class _Copied(torch.utils.data.Dataset[Any]):
    """Samples for processes that share no memory with this one: the tensors of a data set are copied to each."""

    def __init__(self, samples: _Samples) -> None:
        self._samples = samples

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (pickle.dumps(self._samples),)


def _together(samples: Sequence["_Batch | _Problem"]) -> "_Batch | _Problem":
    pairs = []
    for sample in samples:
        if isinstance(sample, _Problem):
            return sample
        pairs.append(sample)
    xs, ys = zip(*pairs, strict=True)
    return torch.stack(xs), torch.stack(ys)


def _packed(samples: Sequence["_Batch | _Problem"]) -> "list[_Packed] | _Problem":
    """As `_together`, without shared memory: the arrays go through the pipe of the process."""
    batch = _together(samples)
    if isinstance(batch, _Problem):
        return batch
    return [(part.flatten().view(torch.uint8).numpy(), part.dtype, part.shape) for part in batch]


def _unpacked(parts: Sequence[_Packed]) -> _Batch:
    x, y = (torch.from_numpy(array).view(dtype).reshape(shape) for array, dtype, shape in parts)
    return x, y


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
        silence: the seconds without a batch of these processes after which a pass ends.

    Raises:
        DataError: the first sample of a split cannot be read.
    """

    def __init__(self, splits: Mapping[str, Any], loading: Loading, silence: float = SILENCE) -> None:
        self._samples, self._loading, self._batches = _Samples(splits), loading, _Batches()
        self._silence = silence
        self._piped = False  # batches go through pipes, because the shared memory is too small for them
        self._loader: torch.utils.data.DataLoader[Any] | None = None

    def read(self, keys: Sequence[Sequence[_Key]], device: torch.device) -> Iterator[_Batch]:
        """Batches of samples. A later call ends an earlier one.

        Raises:
            DataError: a sample cannot be used (the message names it), or the reading processes cannot be started, have
                ended, or give nothing.
        """
        if self._is_short(keys):
            self.close()
            self._piped = True
        self._batches.keys = keys
        loaded = self._started()
        for batch_keys in keys:
            batch, waited = None, time.monotonic()
            while batch is None:
                try:
                    batch = next(loaded)
                except RuntimeError as error:
                    silent = _TIMED_OUT in str(error)
                    if silent and time.monotonic() < waited + self._silence:
                        continue
                    self.close(at_once=silent)
                    if silent:
                        wire = f"the processes that read the data have given nothing for {self._silence:g} seconds"
                        raise DataError(self._silent(keys, batch_keys), wire=wire) from error
                    first_line = str(error).partition("\n")[0]
                    ended = "a process that reads the data has ended"
                    raise DataError(f"{ended}: {first_line}", wire=ended) from error
            if isinstance(batch, _Problem):
                raise batch.error()
            x, y = _unpacked(batch) if self._piped else batch
            yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    def close(self, *, at_once: bool = False) -> None:
        """Ends the reading processes; `at_once` does not wait for the sample that each reads."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:  # each process takes 5 seconds to end if the garbage collector finds it later
            for process in iterator._workers if at_once else ():
                process.terminate()
            iterator._shutdown_workers()
        self._loader = None

    def _started(self) -> Iterator[Any]:
        """A pass of the reading processes, which are started if there are none."""
        try:
            with short_enough():
                return iter(self._open())
        except Exception as error:
            busy = _TIMED_OUT in str(error)  # with samples of an earlier pass
            self.close(at_once=busy)
            if busy:
                return self._started()
            if not self._piped and "shared memory" in str(error):  # for the tensors that the data set holds
                shared_memory.warn("the data set takes more there")
                self._piped = True
                return self._started()
            unsent = "the data cannot be sent to the processes that read it"
            raise DataError(f"{unsent}: {_cause(error)}", wire=f"{unsent}: {place(error)}") from error

    def _is_short(self, keys: Sequence[Sequence[_Key]]) -> bool:
        """True if a pass over these samples takes more shared memory than is free. The log says so, once."""
        processes, free = self._loading.workers, shared_memory.free_bytes()
        if self._piped or not (processes and keys and free is not None):
            return False
        largest = max(keys, key=len)
        part_bytes = self._samples.part_bytes[largest[0][0]]
        needed = shared_memory.pass_bytes(part_bytes, len(largest), len(keys), processes)
        if needed <= free:
            return False
        batches = f"batches of {counted(len(largest), 'sample')} for {counted(processes, 'process', 'processes')}"
        shared_memory.warn(f"{batches} take {needed / 1e6:.1f} MB there")
        return True

    def _silent(self, keys: Sequence[Sequence[_Key]], missing: Sequence[_Key]) -> str:
        """Why the batch with the keys `missing` has not come. Where memory is missing, the next pass has pipes."""
        name, first = missing[0]
        if self._is_short(keys):
            self._piped = True
            cause = f"{shared_memory.SHARED_MEMORY} is full; the next work is done without it"
        else:
            cause = (
                "reading one of them takes that long, or waits for ever, or others filled "
                f"{shared_memory.SHARED_MEMORY} meanwhile"
            )
        return (
            f"the processes that read the data have given nothing for {self._silence:g} seconds; the next batch has "
            f"{counted(len(missing), 'sample')} of the {name} split, and begins with sample {first}: {cause}"
        )

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
                _Copied(self._samples) if self._piped else self._samples,
                batch_sampler=self._batches,  # type: ignore[arg-type]
                collate_fn=_packed if self._piped else _together,
                num_workers=workers,
                timeout=min(_LOOK, self._silence) if workers else 0,
                pin_memory=pin,
                persistent_workers=workers > 0,
                multiprocessing_context=context,
                generator=torch.Generator(),  # a separate one: the model draws from torch's generator
            )
        return self._loader


def _cause(error: Exception) -> str:
    """Why the reading processes cannot be started."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    place = error.filename
    if error.errno in (errno.ENOSPC, errno.EROFS, errno.EACCES):  # of a semaphore, which lies there
        place = place or shared_memory.SHARED_MEMORY
    return f"{place}: {error.strerror}" if place else error.strerror


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

    def check_readable(self, size: int) -> None:
        """Raises WorkError if minibatches of this size are the whole split, whatever its size."""
        if size == 0:
            raise WorkError(
                f"a minibatch of the whole {self._name} split (batch_size = 0), and this worker's {self._count} "
                "samples are not in memory: give a number",
                reason="whole-split",
            )

    def minibatches(self, size: int, seed: int, count: int, *, even: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """As `federation.training.sgd.minibatches`; the first `count`, and no other samples are read."""
        self.check_readable(size)
        generator = torch.Generator().manual_seed(seed)
        while count > 0:
            whole = size >= self._count
            order = torch.arange(self._count) if whole else torch.randperm(self._count, generator=generator)
            batches = torch.split(order, Cut.of(self._count, size, even=even).sizes)[:count]
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

    def _read(self, batches: Sequence[Tensor]) -> Iterator[_Batch]:
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
