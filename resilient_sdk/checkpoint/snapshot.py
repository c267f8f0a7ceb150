"""A rank's snapshots in this node's shared memory. They outlive the process that made them."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from resilient_sdk.checkpoint.capture import copy_and_hash
from resilient_sdk.checkpoint.layout import (
    Bytes,
    Place,
    Sizes,
    Source,
    State,
    Table,
    aligned,
    end_of,
    place_arrays,
    scalars_hash,
    state_of,
)
from resilient_sdk.checkpoint.slot import Header, Slot
from resilient_sdk.errors import Corrupt, InvalidTransition, NothingToRestore
from resilient_sdk.faults import NO_FAULTS, FaultPlan
from resilient_sdk.ids import Generation, Rank, Step
from resilient_sdk.store.directories import own_directory

_logger = logging.getLogger(__name__)
_SLOTS = 3
_UNUSED = (-1, -1)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A rank's complete state after a step, in memory. `table` says what it holds."""

    table: Table

    @property
    def step(self) -> Step:
        return self.table.step

    @property
    def generation(self) -> Generation:
        return self.table.generation

    @property
    def nbytes(self) -> int:
        """Bytes of the stream."""
        return self.table.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Pinned:
    """A snapshot that stays untouched until it is released. `stream` is read-only and not verified."""

    table: Table
    stream: Bytes
    slot: int


class SnapshotFile:
    """All snapshots of one rank on this node: a directory with three slots.

    Two alternate, so that while one is being written the step before stays complete. The third is there
    because whoever uploads may *pin* one slot for as long as a slow store needs, and a capture must neither
    wait for it nor tear it. It is allocated when it is first needed.

    `capture`, `steps`, `read` and `forget_after` belong to one thread of the rank's only owner (a generation
    has one); `pin`, `holds` and `release` may be called from another. Two owners at once would tear each
    other's slots: the old one must be dead before the new one opens the directory.
    """

    def __init__(self, directory: Path, *, sizes: Sizes | None = None) -> None:
        """Makes the directory (0700), or opens again what a dead owner left. Raises StoreUnavailable for one
        that cannot be used, NewerFormat for one that a newer version wrote."""
        own_directory(directory)
        self._directory = directory
        self._sizes = sizes or Sizes()
        self._slots = tuple(Slot(directory / f"slot-{number}") for number in range(_SLOTS))
        # Held for bookkeeping only, never while bytes are copied: nobody waits for a capture or an upload.
        self._lock = threading.Lock()
        self._pinned = -1
        self._pins = 0
        self._trusted: dict[int, Header] = {}
        self._headers()

    def capture(
        self,
        *,
        step: Step,
        generation: Generation,
        sources: Sequence[Source],
        scalars: bytes,
        rank: Rank | None = None,
        faults: FaultPlan = NO_FAULTS,
    ) -> Snapshot:
        """Copies the state into the slot with the oldest unpinned step; earlier snapshots stay as they are.

        Returns when the snapshot is complete and later changes of the sources cannot reach it. Raises
        StoreFull where memory lacks, ValueError for two sources of one name, and whatever a source raises;
        the slot is incomplete then. `rank` and `faults` are for the fault point "capture", struck half-way.
        """
        places, blob = place_arrays(sources), _Blob(scalars)
        last = Place(blob.name, end_of(places), blob.nbytes)
        nbytes = last.offset + last.nbytes
        number, stream = self._begin(nbytes, _table_estimate(places, nbytes, self._sizes.chunk))
        parts = [*zip(places, sources, strict=True), (last, blob)]
        halfway = partial(faults.point, "capture", rank=rank, step=step)
        hashes = copy_and_hash(stream, parts, self._sizes, halfway)
        table = Table(
            step=step,
            generation=generation,
            nbytes=nbytes,
            arrays=places,
            scalars_nbytes=blob.nbytes,
            scalars_sha256=scalars_hash(scalars),
            chunk_nbytes=self._sizes.chunk,
            chunks=hashes,
        )
        with self._lock:
            self._trusted[number] = self._slots[number].finish(table)
        return Snapshot(table)

    def steps(self) -> tuple[Step, ...]:
        """Returns the complete and verified steps, newest first. A damaged one is logged and left out. What
        this process captured itself is trusted here; `read` trusts nothing."""
        return tuple(dict.fromkeys(snapshot.step for snapshot in self.complete()))

    def complete(self) -> tuple[Snapshot, ...]:
        """Returns the same as `steps`, with generation and table."""
        with self._lock:
            headers = self._headers()
        newest_first = sorted(headers.items(), key=lambda item: item[1].order, reverse=True)
        found = (self._check(number, header) for number, header in newest_first)
        return tuple(snapshot for snapshot in found if snapshot)

    def newest(self) -> Step | None:
        """Returns the newest complete step, unverified: what was captured last, not what can be restored."""
        with self._lock:
            header = max(self._headers().values(), key=lambda header: header.order, default=None)
        return None if header is None else Step(header.step)

    def read(self, step: Step) -> State:
        """Returns the state of `step`, every hash checked. Raises Corrupt; NothingToRestore where it is not
        here.

        The arrays are views of the slot, good until the next `capture`: use them up or copy them before it.
        """
        with self._lock:
            number, header = self._find(step)
        return state_of(*self._slots[number].verified(header))

    def forget_after(self, step: Step) -> None:
        """Invalidates every newer step: it is going to be run again."""
        with self._lock:
            for number, header in self._headers().items():
                if header.step > step:
                    self._slots[number].invalidate()

    def pin(self, step: Step, generation: Generation | None = None) -> Pinned:
        """Holds the slot of `step`: no capture overwrites it until as many calls of `release`. Without a
        generation it is the newest one's.

        Raises NothingToRestore where the step is not here, Corrupt for a damaged table, and InvalidTransition
        while another slot is pinned: with two of three held, a capture would have to overwrite the newest
        step.
        """
        with self._lock:
            number, header = self._find(step, generation)
            if self._pinned not in (-1, number):
                raise InvalidTransition("a slot is pinned already", step=step)
            slot = self._slots[number]
            pinned = Pinned(slot.table(header), slot.stream(header), number)
            self._pinned = number
            self._pins += 1
        return pinned

    def holds(self, pinned: Pinned) -> bool:
        """Whether the pinned snapshot is still valid: a rollback may have forgotten its step."""
        with self._lock:
            header = self._slots[pinned.slot].header()
        return header is not None and header.order == (pinned.table.generation, pinned.table.step)

    def release(self, pinned: Pinned) -> None:
        """Undoes one `pin`. Raises InvalidTransition for one that was released before."""
        with self._lock:
            if self._pinned != pinned.slot:
                raise InvalidTransition("this slot is not pinned", step=pinned.table.step)
            self._pins -= 1
            if self._pins == 0:
                self._pinned = -1

    def close(self) -> None:
        """Lets go of the memory; the snapshots stay. States that were read stay usable."""
        for slot in self._slots:
            slot.close()

    def remove(self) -> None:
        """Closes, and gives the memory back: the snapshots are gone."""
        for slot in self._slots:
            slot.remove()
        self._directory.rmdir()

    def _begin(self, nbytes: int, table_nbytes: int) -> tuple[int, Bytes]:
        with self._lock:
            number = self._oldest()
            self._slots[number].invalidate()
        # Outside the lock: the first allocation of a large state takes long. Nobody else finds this slot now.
        return number, self._slots[number].begin(nbytes, table_nbytes)

    def _oldest(self) -> int:
        headers = self._headers()
        orders = [headers[number].order if number in headers else _UNUSED for number in range(_SLOTS)]
        newest = orders.index(max(orders)) if headers else -1
        free = [number for number in range(_SLOTS) if number not in (newest, self._pinned)]
        return min(free, key=lambda number: (not self._slots[number].in_use, orders[number]))

    def _headers(self) -> dict[int, Header]:
        found = ((number, slot.header()) for number, slot in enumerate(self._slots))
        return {number: header for number, header in found if header is not None}

    def _find(self, step: Step, generation: Generation | None = None) -> tuple[int, Header]:
        wanted = (item for item in self._headers().items() if item[1].step == step)
        found = [item for item in wanted if generation in (None, item[1].generation)]
        if not found:
            raise NothingToRestore(f"step {step} is not in {self._directory}", step=step)
        return max(found, key=lambda item: item[1].order)

    def _check(self, number: int, header: Header) -> Snapshot | None:
        slot = self._slots[number]
        try:
            if self._trusted.get(number) == header:
                return Snapshot(slot.table(header))
            table, _ = slot.verified(header)
        except Corrupt as error:
            _logger.warning("a snapshot in %s is not used: %s", self._directory, error)
            return None
        self._trusted[number] = header
        return Snapshot(table)


class _Blob:
    """The scalars as the stream's last array."""

    name = "scalars"

    def __init__(self, data: bytes) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self.nbytes = len(data)

    def copy_into(self, target: Bytes, offset: int) -> None:
        target[:] = self._data[offset : offset + len(target)]


def _table_estimate(places: Sequence[Place], nbytes: int, chunk_nbytes: int) -> int:
    # A name's letter is at most twelve in JSON (a surrogate pair). Too little costs a second mapping, no
    # more.
    names = sum(12 * len(place.name) + 64 for place in places)
    return aligned(1024 + names + 40 * (nbytes // chunk_nbytes + 1))
