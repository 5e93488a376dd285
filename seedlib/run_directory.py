"""What a run leaves in its log directory: configuration, progress, summary and failures.

Every file is written whole: a reader, another process or a crash never meets half a file. Nothing
that an earlier run left is overwritten or deleted.

    config.json            everything needed to repeat the run
    config.resumed-N.json  the same, where run N went on with a value that may differ
    progress.json          the newest figures, for a live line
    running.json           how to join the run, for its user alone; only while it is going on
    summary.json           the last figures
    failures/              one traceback per failed node
    tensorboard/           see `seedlib.metrics`, which also writes one CSV per label
"""

import contextlib
import dataclasses
import enum
import fcntl
import json
import math
import os
import pathlib
import re
import threading
import time
import traceback
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

_CONFIG = "config.json"
_SUMMARY = "summary.json"
_PROGRESS = "progress.json"
_RUNNING = "running.json"
_FAILURES = "failures"
_LOCK = ".lock"

# A folder that holds one of these, and no configuration, is not empty and not ours to write in.
_SIGNS_OF_A_RUN = (_SUMMARY, _PROGRESS, _FAILURES, "checkpoints", "tensorboard", "curve.png")

_ABSENT = object()


class RunDirectoryError(Exception):
    """The directory cannot be used for this run; the message is one line for the user."""


class _NotThere(RunDirectoryError):
    """A file does not exist."""


class ConfigurationMismatch(RunDirectoryError):
    """The directory holds another configuration; the message names the first difference."""


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The log directory of one run. A value: any process may hold one, and it pickles.

    Attributes:
      path: the directory; made by `prepare`.
    """

    path: str

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Names the directory; touches nothing.

        Args:
          path: where; `~` is expanded and the path made absolute, so that processes that were
            started in other places mean the same one.
        """
        object.__setattr__(self, "path", os.path.abspath(os.path.expanduser(os.fspath(path))))

    def file(self, name: str) -> str:
        """Returns the path of a file or folder of that name in the directory."""
        return os.path.join(self.path, name)

    def prepare(self, config: Mapping[str, Any], may_differ: Sequence[str] = ()) -> bool:
        """Creates the directory with its `config.json`, or checks that it is of the same run.

        Args:
          config: everything needed to repeat the run. Values are numbers, texts, booleans, None,
            enums, paths, dataclasses, or mappings and sequences of these.
          may_differ: fields (`"num_steps"`, or nested `"agent.log_every"`) in which a resumed run
            may differ from the one that it goes on with.

        Returns:
          Whether this goes on with an earlier run.

        Raises:
          ConfigurationMismatch: where the directory is of another configuration, naming the first
            field that differs and both values.
          RunDirectoryError: where the path is no directory, or holds a run without its
            configuration.
          TypeError: where a value of `config` cannot be stored, naming the field.
        """
        # A limit of infinity is a choice worth keeping, so it is stored as text and not as null.
        ours = to_json(config, "config", non_finite=repr)
        try:
            os.makedirs(self.path, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise RunDirectoryError(f"logdir {self.path}: is not a directory") from None
        except PermissionError:
            raise RunDirectoryError(f"logdir {self.path}: may not be created") from None
        except OSError as error:
            raise RunDirectoryError(f"logdir {self.path}: {error.strerror}") from None
        if not os.path.exists(self.file(_CONFIG)):
            self._refuse_foreign()
            with contextlib.suppress(FileExistsError):  # Another process was faster: compare.
                _create_atomically(self.file(_CONFIG), _dump(ours))
                return False
        difference = first_difference(self.read_config(), ours, may_differ)
        if difference is not None:
            field, theirs, wanted = difference
            raise ConfigurationMismatch(
                f"logdir {self.path} holds a run with {field}={_show(theirs)}, this one has "
                f"{field}={_show(wanted)}; use another logdir or the same configuration"
            )
        if self.read_config() != ours:
            self._keep_resumed_config(ours)
        return True

    def read_config(self) -> dict[str, Any]:
        """Returns `config.json`.

        Raises:
          RunDirectoryError: where it is not there or is not a JSON object.
        """
        return _read_object(self.file(_CONFIG))

    @contextlib.contextmanager
    def claim(self) -> Iterator[None]:
        """Keeps other runs out of the (prepared) directory while the context lasts.

        The operating system lets go when the process ends, however it ends.

        Raises:
          RunDirectoryError: where another run is using the directory.
        """
        descriptor = _lock(self.file(_LOCK))
        if descriptor is None:
            raise RunDirectoryError(f"logdir {self.path}: another run is using it at this moment")
        try:
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def claim_actor(self, indices: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Keeps the first free one of some actors for this process while the context lasts.

        Args:
          indices: the actors that may join the run.

        Yields:
          The actor's index, and how often it was claimed before.

        Raises:
          RunDirectoryError: where others have all of them.
        """
        taken = []
        for index in indices:
            descriptor = _lock(self.file(f".actor-{index}"))
            if descriptor is None:
                taken.append(str(index))
                continue
            try:
                before = int(os.pread(descriptor, 20, 0) or 0)
                os.pwrite(descriptor, str(before + 1).encode(), 0)
                yield index, before
            finally:
                os.close(descriptor)
            return
        raise RunDirectoryError(
            f"logdir {self.path}: no place is free; others have joined as actor {', '.join(taken)}"
        )

    def write_running(self, running: Mapping[str, Any]) -> None:
        """Writes `running.json`, whole: how to join the run, which has claimed the directory.

        Nobody but the user can read it, since it holds what keeps others out of the run.

        Raises:
          TypeError: where a value cannot be stored, naming the field.
        """
        text = _dump(to_json(running, "running", non_finite=repr))
        write_atomically(self.file(_RUNNING), text, mode=0o600)

    def remove_running(self) -> None:
        """Removes `running.json`, where there is one; for who has claimed the directory."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.file(_RUNNING))

    def read_running(self) -> dict[str, Any] | None:
        """Returns `running.json`, or None where no run is going on; one may have been killed.

        Raises:
          RunDirectoryError: where it is another user's.
        """
        running = self._read_if_there(_RUNNING)
        return running if running is not None and _locked(self.file(_LOCK)) else None

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes `summary.json`, whole. Numbers that are not finite become null.

        Raises:
          TypeError: where a value cannot be stored, naming the field.
        """
        write_atomically(self.file(_SUMMARY), _dump(to_json(summary, "summary")), durable=True)

    def read_summary(self) -> dict[str, Any] | None:
        """Returns `summary.json`, or None where there is none yet."""
        return self._read_if_there(_SUMMARY)

    def write_progress(self, progress: Mapping[str, Any]) -> None:
        """Writes `progress.json`, whole. Numbers that are not finite become null.

        Raises:
          TypeError: where a value cannot be stored, naming the field.
        """
        write_atomically(self.file(_PROGRESS), _dump(to_json(progress, "progress")))

    def read_progress(self) -> dict[str, Any] | None:
        """Returns `progress.json`, or None where there is none yet."""
        return self._read_if_there(_PROGRESS)

    def record_failure(self, node: str, error: BaseException) -> str:
        """Keeps the whole traceback of `error`, with its causes.

        Args:
          node: which node failed, for example `"actor 3"`.
          error: what it failed with.

        Returns:
          The path of the file.
        """
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        os.makedirs(self.file(_FAILURES), exist_ok=True)
        # Zero-padded nanoseconds in front, so that names sort by time. Several nodes fail after
        # one another when the first one takes the others down, and the first is the cause.
        name = f"{time.time_ns():020d}-{os.getpid()}-{urllib.parse.quote(node, safe='')}.txt"
        path = os.path.join(self.file(_FAILURES), name)
        write_atomically(path, text, durable=True)
        return path

    def failures(self, pid: int | None = None) -> list[tuple[str, str]]:
        """Returns `(node, traceback)` of every recorded failure, the earliest first.

        Args:
          pid: only those that this process recorded; None for all.
        """
        try:
            names = sorted(os.listdir(self.file(_FAILURES)))
        except FileNotFoundError:
            return []
        found = []
        for name in names:
            match = re.fullmatch(r"\d{20}-(\d+)-(.*)\.txt", name)
            if match and pid in (None, int(match.group(1))):
                with open(os.path.join(self.file(_FAILURES), name), encoding="utf-8") as file:
                    found.append((urllib.parse.unquote(match.group(2)), file.read()))
        return found

    def first_failure(self, pid: int | None = None) -> tuple[str, str] | None:
        """Returns `(node, traceback)` of the earliest failure (of one process), or None."""
        return next(iter(self.failures(pid)), None)

    def clear_failures(self) -> str | None:
        """Moves what earlier runs recorded aside, so that `first_failure` means this run.

        Returns:
          Where they are now, or None where there were none.
        """
        for attempt in range(1, 10_000):
            aside = self.file(f"{_FAILURES}.{attempt}")
            if not os.path.exists(aside):
                break
        try:
            os.rename(self.file(_FAILURES), aside)
        except FileNotFoundError:
            return None
        return aside

    def _refuse_foreign(self) -> None:
        """Raises RunDirectoryError where a run lies here whose configuration is not known."""
        for name in sorted(os.listdir(self.path)):
            if name in _SIGNS_OF_A_RUN or name.endswith(".csv"):
                raise RunDirectoryError(
                    f"logdir {self.path}: holds {name} but no {_CONFIG}, so it cannot be resumed "
                    "and will not be overwritten; use another logdir"
                )

    def _keep_resumed_config(self, config: Any) -> None:
        """Stores the configuration of a run that resumed with other values than the first."""
        for number in range(1, 10_000):
            with contextlib.suppress(FileExistsError):
                _create_atomically(self.file(f"config.resumed-{number}.json"), _dump(config))
                return
        raise RunDirectoryError(f"logdir {self.path}: resumed too often")

    def _read_if_there(self, name: str) -> dict[str, Any] | None:
        """Returns a JSON object, or None where the file does not exist."""
        try:
            return _read_object(self.file(name))
        except _NotThere:
            return None


def to_json(
    value: Any, name: str = "value", non_finite: Callable[[float], Any] = lambda _: None
) -> Any:
    """Returns `value` made of what JSON has.

    NumPy and JAX scalars and arrays become numbers and lists, dataclasses and named tuples become
    objects, enums their names.

    Args:
      value: what to convert.
      name: what to call it in messages.
      non_finite: what to store for NaN and infinities, which JSON lacks; None by default.

    Raises:
      TypeError: where a part has no JSON form, naming it.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else non_finite(float(value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): to_json(item, f"{name}.{key}", non_finite) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [to_json(item, f"{name}.{index}", non_finite) for index, item in enumerate(value)]
    if hasattr(value, "__array__") and hasattr(value, "dtype"):
        array = np.asarray(value)
        if array.dtype.kind in "biuf":
            return to_json(array.tolist(), name, non_finite)
    raise TypeError(f"{name}: a {type(value).__name__} cannot be stored as JSON")


def first_difference(
    theirs: Any, ours: Any, may_differ: Sequence[str] = (), name: str = ""
) -> tuple[str, Any, Any] | None:
    """Returns `(field, theirs, ours)` of the first leaf in which two JSON values differ, or None.

    Args:
      theirs: a JSON value.
      ours: another; its order of fields is the order of comparison.
      may_differ: dotted names of fields that are not compared, with all that is below them.
      name: the dotted name of both values.
    """
    if name in may_differ:
        return None
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            difference = first_difference(
                theirs.get(key, _ABSENT),
                ours.get(key, _ABSENT),
                may_differ,
                f"{name}.{key}" if name else key,
            )
            if difference is not None:
                return difference
        return None
    # `type` because True == 1 in Python; 1 and 1.0 are the same number in a configuration.
    same = theirs == ours and isinstance(theirs, bool) == isinstance(ours, bool)
    return None if same else (name, theirs, ours)


def write_atomically(path: str, text: str, durable: bool = False, mode: int = 0o666) -> None:
    """Writes a text file so that a reader sees the old contents or the new, never a part.

    Args:
      path: the file.
      text: its contents, stored as UTF-8.
      durable: whether to wait until the contents are on the disk.
      mode: who may read and write it, as far as the user's mask allows.
    """
    temporary = _write_temporary(path, text, durable, mode)
    try:
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _create_atomically(path: str, text: str) -> None:
    """Like `write_atomically`, but raises FileExistsError where the file exists."""
    temporary = _write_temporary(path, text, durable=True)
    try:
        # A link fails where the name is taken; a rename would replace the other's file.
        os.link(temporary, path)
    finally:
        os.unlink(temporary)


def _write_temporary(path: str, text: str, durable: bool, mode: int = 0o666) -> str:
    """Writes `text` to a hidden file beside `path` that no other thread uses; returns its path."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.{threading.get_ident()}.tmp")

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, mode)

    with open(temporary, "w", encoding="utf-8", opener=opener) as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    return temporary


def _lock(path: str) -> int | None:
    """Locks a file, made where it is missing; returns what to close, or None where others do."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _locked(path: str) -> bool:
    """Returns whether somebody has locked a file; does not keep anybody from locking it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared, so that those who ask at the same time do not take each other for a run.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _read_object(path: str) -> dict[str, Any]:
    """Returns the JSON object in a file; raises RunDirectoryError where there is none."""
    try:
        value = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _NotThere(f"{path}: does not exist") from None
    except PermissionError:
        raise RunDirectoryError(f"{path}: may not be read") from None
    except ValueError as error:
        raise RunDirectoryError(f"{path}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RunDirectoryError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _dump(value: Any) -> str:
    """Returns JSON text that a person can read and every parser accepts."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def _show(value: Any) -> str:
    """Returns a value as a message shows it."""
    return "(absent)" if value is _ABSENT else json.dumps(value)
