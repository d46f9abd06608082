"""Names the grid of runs and brings each to done exactly once, in processes of their own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from qed.config import to_dict
from qed.data.sources import find_files
from qed.records import read_json, write_json
from qed.study.presets import RunConfig, StudyConfig
from qed.study.progress import Bars

POLL_SECONDS = 0.5


def reproduce(study: StudyConfig, out: Path, *, jobs: int | None = None) -> int:
    """Bring the whole study in ``out`` to done, write ``out/report``, and print what came out; the exit status.

    A run that fails does not stop the others; the report then names the gap and the status is 1.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1; got {jobs}")
    if study.data is not None:
        find_files(study.data)
    with locked(out) as lock, as_interrupts(signal.SIGTERM, signal.SIGHUP):
        folders = prepare(study, out)
        done = [folder.name for folder in folders if is_done(folder)]
        if done:
            print(f"already done, skipped: {', '.join(done)}")
        results = run_all(folders, jobs=jobs, lock=lock)
        failed = [folder for folder, result in results.items() if result != "done"]
        for folder in failed:
            failure = folder / "failure.json"
            reason = read_json(failure)["error"] if failure.exists() else "killed from outside; run again to go on"
            print(f"{folder.name} {results[folder]}: {reason} (see {folder / 'log.txt'})", file=sys.stderr)
        if len(failed) == len(folders):
            return 1
        # Drawing libraries take seconds to load: a wrong argument is answered before, and the runs start before.
        from qed.report import report

        page = report(folders, out / "report", title=study.title, label=study.label)
    _print_accuracies([folder for folder in folders if folder not in failed])
    print(f"\nreport:  {page}\nnumbers: {page.with_name('report.json')}\nruns:    {out}")
    return 1 if failed else 0


def is_done(folder: Path) -> bool:
    return (folder / "niah.json").exists()


def prepare(study: StudyConfig, out: Path) -> dict[Path, RunConfig]:
    """Folders of the grid, each with its ``config.json``; nothing is started.

    Raises:
        ValueError: a folder already holds a run of another config; the message names the first key that differs.
    """
    folders = {out / run.name: run for run in study.runs()}
    for folder, run in folders.items():
        path = folder / "config.json"
        if path.exists():
            difference = _first_difference(read_json(path), to_dict(run))
            if difference:
                raise ValueError(f"{folder} holds another run: {difference}; choose another --out")
    for folder, run in folders.items():
        if not (folder / "config.json").exists():
            write_json(folder / "config.json", to_dict(run))
    return folders


def run_all(folders: dict[Path, RunConfig], *, jobs: int | None = None, lock: int | None = None) -> dict[Path, str]:
    """Run what is not done; return the status of every folder: "done", "failed" or "stopped".

    ``jobs``: processes at a time; by default as many as there are CPU cores and runs. Every process gets an equal
    share of the cores. Ctrl-C reaches the processes too: each saves its state, and the next call goes on from there.
    ``lock``: a descriptor from :func:`locked`, which the processes keep until they end.
    """
    waiting = [folder for folder in folders if not is_done(folder)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = min(jobs or cores, max(1, len(waiting)))
    threads = max(1, cores // jobs)
    running: dict[Path, subprocess.Popen] = {}
    first = next(iter(folders.values()))
    bars = Bars(first.train.num_steps, first.niah.num_examples * len(first.niah.lengths) * len(first.niah.tasks))
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                folder = waiting.pop(0)
                running[folder] = _start(folder, threads, lock)
            time.sleep(POLL_SECONDS)
            bars.update(running, num_waiting=len(waiting))
            for folder in [folder for folder, process in running.items() if process.poll() is not None]:
                del running[folder]
                bars.close([folder])
    except KeyboardInterrupt:
        for process in running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        for process in running.values():
            process.wait()
        raise
    finally:
        for process in running.values():
            if process.poll() is None:
                process.terminate()
        bars.end()
    return {folder: status(folder) for folder in folders}


def status(folder: Path) -> str:
    """ "done", "failed" (``failure.json`` says why), or "stopped"."""
    if is_done(folder):
        return "done"
    return "failed" if (folder / "failure.json").exists() else "stopped"


@contextlib.contextmanager
def locked(out: Path) -> Iterator[int]:
    """Refuse (``ValueError``) to work in a folder that another process is working in; gives the lock's descriptor.

    A process that inherits the descriptor keeps the folder locked, so a run that outlives the study is not doubled.
    """
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process is working in {out}; wait for it or choose another --out") from None
        yield file.fileno()


@contextlib.contextmanager
def as_interrupts(*numbers: int) -> Iterator[None]:
    """These signals do as Ctrl-C does: a study that is stopped stops its runs. Ignored ones (nohup) stay ignored."""
    main = threading.current_thread() is threading.main_thread()
    caught = [number for number in numbers if main and signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, signal.default_int_handler) for number in caught}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _print_accuracies(folders: list[Path]) -> None:
    """Accuracy by length with Wilson 95 % intervals, and how many examples each rests on."""
    records = {folder.name: read_json(folder / "niah.json")["scores"] for folder in folders}
    scores = next(iter(records.values()))
    print(f"\nS-NIAH-1 accuracy in %, [95 % interval], {scores[0]['num_examples']} examples a length")
    width = max(map(len, records)) + 2
    print(" " * width + "".join(f"{score['length']:>18,}" for score in scores))
    for name, rows in records.items():
        cells = (f"{100 * r['accuracy']:.1f} [{100 * r['wilson'][0]:.0f}, {100 * r['wilson'][1]:.0f}]" for r in rows)
        print(f"{name:<{width}}" + "".join(f"{cell:>18}" for cell in cells))


def _start(folder: Path, threads: int, lock: int | None) -> subprocess.Popen:
    with open(folder / "log.txt", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "qed.study.worker", str(folder), "--threads", str(threads)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C is passed on by hand, once: a second one would cut short the saving of a run's state.
            start_new_session=True,
            pass_fds=[] if lock is None else [lock],
        )


def _first_difference(old: object, new: object, path: str = "") -> str | None:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            found = _first_difference(old.get(key), new.get(key), f"{path}.{key}" if path else key)
            if found:
                return found
        return None
    return None if old == new else f"{path} = {old!r} there, {new!r} now"
