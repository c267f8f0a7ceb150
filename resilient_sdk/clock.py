"""The one door through which time comes in."""

import time
from typing import Protocol


class Clock(Protocol):
    """Time as data. `monotonic` is for durations, `wall` for what a person reads."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back. Comparable between processes of one machine."""
        ...

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC."""
        ...

    def sleep(self, seconds: float) -> None:
        """Blocks the calling thread."""
        ...


class SystemClock:
    """The machine's own clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


SYSTEM_CLOCK: Clock = SystemClock()
