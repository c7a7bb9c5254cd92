"""A run on disk: a folder that can be left at any moment, even by SIGKILL, and taken up again.

    run.json       what was asked for, and what follows from it for this model
    samples.jsonl  one line per sample, of nothing but what the request decides: equal for equal requests
    timings.jsonl  one line per batch: how long it took

Lines are appended with one write and one fsync per batch. A line that was cut off in the middle is dropped when the
run is taken up. The timing of a batch is written before its samples, so every sample has one; of a batch that was done
twice, because its samples never got written, the last timing counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcompress.errors import KVCompressError
from kvcompress.report import write_json

RUN, SAMPLES, TIMINGS = "run.json", "samples.jsonl", "timings.jsonl"
Key = tuple[str, str, str, int, int]


def key_of(sample: Mapping[str, Any]) -> Key:
    """What tells the samples of a run apart."""
    return sample["recipe"], sample["budget"], sample["task"], sample["problem"], sample["sample"]


def open_folder(folder: Path) -> None:
    """Make the folder of a run, or make sure that it can be written.

    Raises:
        KVCompressError: if it can't.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KVCompressError(f"folder: {folder} cannot be made: {error.strerror or error}") from error
    if not os.access(folder, os.W_OK):
        raise KVCompressError(f"folder: {folder} is not writable")


def read_run(folder: Path) -> dict[str, Any] | None:
    """What ``run.json`` says, or None for a run that hasn't begun.

    Raises:
        KVCompressError: if it cannot be read, or samples lie there without it.
    """
    path = folder / RUN
    if not path.exists():
        # An empty one is there as soon as a process has locked it, just before it writes run.json.
        if (folder / SAMPLES).exists() and (folder / SAMPLES).stat().st_size:
            raise KVCompressError(f"folder: {folder} has {SAMPLES} but no {RUN}, so it is no run; use another folder")
        return None
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KVCompressError(f"folder: {path} cannot be read: {error}") from error
    if not isinstance(run, dict) or "request" not in run:
        raise KVCompressError(f"folder: {path} is not the {RUN} of an evaluation; use another folder")
    return run


def write_run(folder: Path, run: Mapping[str, Any]) -> None:
    """Write ``run.json``, whole or not at all."""
    write_json(folder / RUN, run)


def check_same(folder: Path, before: Any, now: Any) -> None:
    """Refuse to take up a run with another request.

    Raises:
        KVCompressError: naming the first difference.
    """
    difference = first_difference(before, json.loads(json.dumps(now)))
    if difference is not None:
        where, old, new = difference
        raise KVCompressError(
            f"{where}: the run in {folder} was made with {_short(old)}, this command asks for {_short(new)}; "
            "repeat its command to go on, or use another folder"
        )


def first_difference(before: Any, now: Any, where: str = "") -> tuple[str, Any, Any] | None:
    """(place, old, new) of the first difference of two JSON documents, or None; what is not there is None."""
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = [(name, before.get(name), now.get(name)) for name in [*now, *(n for n in before if n not in now)]]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = [(str(index), old, new) for index, (old, new) in enumerate(zip(before, now, strict=True))]
    else:
        return None if before == now and type(before) is type(now) else (where, before, now)
    for name, old, new in pairs:
        found = first_difference(old, new, f"{where}.{name}" if where else name)
        if found is not None:
            return found
    return None


def read_samples(folder: str | Path) -> list[dict[str, Any]]:
    """All whole lines of the samples of a run, in order.

    Raises:
        KVCompressError: naming the line, if one is not JSON or stands there twice.
    """
    samples = _read_lines(Path(folder) / SAMPLES)
    seen: set[Key] = set()
    for number, sample in enumerate(samples, 1):
        try:
            key = key_of(sample)
        except (KeyError, TypeError) as error:
            raise KVCompressError(f"{Path(folder) / SAMPLES}: line {number} is no sample: {error} missing") from error
        if key in seen:
            raise KVCompressError(f"{Path(folder) / SAMPLES}: line {number} repeats a sample: {key}")
        seen.add(key)
    return samples


def read_timings(folder: str | Path) -> list[dict[str, Any]]:
    """The timings of a run, one per batch: of those of the same samples the last."""
    timings = _read_lines(Path(folder) / TIMINGS)
    return list({json.dumps([t["recipe"], t["budget"], t["task"], t["samples"]]): t for t in timings}.values())


class Journal:
    """The two growing files of a run, open for appending by one process at a time."""

    def __init__(self, samples: int, timings: int) -> None:
        self._samples, self._timings = samples, timings

    def append(self, samples: Sequence[Mapping[str, Any]], timing: Mapping[str, Any]) -> None:
        """Write a batch; it is on disk when this returns.

        Raises:
            KVCompressError: if the disk is full or the like; what is there already can be taken up.
        """
        _append(self._timings, [timing])
        _append(self._samples, samples)


@contextmanager
def open_journal(folder: Path) -> Iterator[Journal]:
    """Take up the files of a run, without the lines that were cut off.

    Raises:
        KVCompressError: if another process has them open.
    """
    handles: list[int] = []
    try:
        for name in (SAMPLES, TIMINGS):
            handles.append(os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666))
        _lock(handles[0], folder)
        for handle in handles:
            _drop_torn_line(handle)
        yield Journal(*handles)
    finally:
        for handle in handles:
            os.close(handle)


def _append(handle: int, records: Sequence[Mapping[str, Any]]) -> None:
    lines = [json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n" for record in records]
    content = "".join(lines).encode()
    try:
        while content:
            content = content[os.write(handle, content) :]
        os.fsync(handle)
    except OSError as error:
        raise KVCompressError(f"folder: results cannot be written: {error.strerror or error}") from error


def _drop_torn_line(handle: int) -> None:
    """Cut the file after its last line feed, looking at no more than its end."""
    size = end = os.fstat(handle).st_size
    while end:
        start = max(0, end - 2**16)
        os.lseek(handle, start, os.SEEK_SET)
        found = os.read(handle, end - start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    if end < size:
        os.ftruncate(handle, end)
        os.fsync(handle)


def _lock(handle: int, folder: Path) -> None:
    """Keep other processes out for as long as this one lives; the system lets go when it is killed."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise KVCompressError(f"folder: {folder} is in use by another evaluation; use another folder") from error


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    records = []
    # Not splitlines: a text may hold other characters that end lines. What follows the last line feed is cut off.
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise KVCompressError(f"{path}: line {number} is not JSON: {error}") from error
    return records


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:197] + "..."
