"""Every error this package raises on purpose.

    ResilientError
    ├── ConfigError             what was asked for cannot work          exit 2
    │   ├── UnknownConfigKey
    │   ├── NeedsModelFactory
    │   └── CannotPickle
    ├── RunError                a run, as its owner sees it
    │   ├── RunNotFound                                                 exit 3
    │   ├── RunUnreachable                                              exit 4
    │   ├── RunFailed           the user's own code failed              exit 1
    │   └── NoStandbyLeft       stopped; its state is committed         exit 5
    ├── StoreError                                                      exit 6
    │   ├── StoreUnavailable    not writable, gone, I/O error
    │   ├── StoreFull
    │   ├── NotFound
    │   └── HeadMoved           compare-and-set lost
    ├── CheckpointError                                                 exit 7
    │   ├── Corrupt             a hash does not match
    │   ├── NewerFormat
    │   └── NothingToRestore
    └── CoordinationError                                               exit 8
        ├── InvalidTransition
        └── StaleGeneration

A message is one line: what happened, then what to do. The evidence rides on the error.
"""


class ResilientError(Exception):
    """Base of all. `fix` is what the reader can do; `evidence` is what was seen."""

    exit_code = 1

    def __init__(self, what: str, *, fix: str = "", **evidence: object) -> None:
        super().__init__(what, fix, evidence)
        self.what = what
        self.fix = fix
        self.evidence = evidence

    def __str__(self) -> str:
        return f"{self.what.rstrip('.')}. {self.fix}" if self.fix else self.what

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.fix, self.evidence))


def _rebuild(kind: type[ResilientError], what: str, fix: str, evidence: dict[str, object]) -> ResilientError:
    return kind(what, fix=fix, **evidence)


class ConfigError(ResilientError):
    """What was asked for cannot work; nothing was started."""

    exit_code = 2


def one_line(problem: BaseException) -> str:
    """Its message, whatever it was, for a place that has one line."""
    return " ".join(str(problem).split())


def is_config_error(kind: object) -> bool:
    """Whether `kind` names a ConfigError: a process that failed is known by its exception's name."""
    found = globals().get(str(kind))
    return isinstance(found, type) and issubclass(found, ConfigError)


class UnknownConfigKey(ConfigError):
    """A key of ds_config that DeepSpeed does not know."""


class NeedsModelFactory(ConfigError):
    """ZeRO-3 partitions a model as it is built, so it must be built again at each recovery."""


class CannotPickle(ConfigError):
    """The function cannot travel to another process."""


class RunError(ResilientError):
    """A run, as its owner sees it."""


class RunNotFound(RunError):
    """No run of that id in the runs' directory."""

    exit_code = 3


class RunUnreachable(RunError):
    """The run's controller does not answer."""

    exit_code = 4


class RunFailed(RunError):
    """The user's own code failed; `evidence` has rank, step and traceback."""


class NoStandbyLeft(RunError):
    """A rank was lost and nothing can take its place. The state is committed: the run can be resumed."""

    exit_code = 5


class StoreError(ResilientError):
    """The place where chunks live."""

    exit_code = 6


class StoreUnavailable(StoreError):
    """Not writable, gone, or an I/O error. What was being written is unknown: write it again."""


class StoreFull(StoreUnavailable):
    """No room left for another value."""


class NotFound(StoreError):
    """No value under that key."""


class HeadMoved(StoreError):
    """A compare-and-set found another value than the one expected."""


class CheckpointError(ResilientError):
    """The saved state."""

    exit_code = 7


class Corrupt(CheckpointError):
    """A hash does not match; the bytes are not used."""


class NewerFormat(CheckpointError):
    """Written by a newer version than this one."""


class NothingToRestore(CheckpointError):
    """No step that every rank can restore."""


class CoordinationError(ResilientError):
    """Who does what."""

    exit_code = 8


class InvalidTransition(CoordinationError):
    """An event that this state cannot take: a defect, never a user's mistake."""


class StaleGeneration(CoordinationError):
    """A message or write from a membership that is over."""
