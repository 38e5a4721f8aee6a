"""Runs cases one after the other, each in a folder of its own, with a limit on its time, and says which were not clean."""

import contextlib
import io
import json
import random
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from pathlib import Path

from .cases import KINDS

SECONDS, WAIT = 20.0, 600.0  # of a case: of CPU, and by the clock on a busy machine
FINE = (ValueError, OSError, RuntimeError, ImportError, FloatingPointError)  # what the command line says in one sentence


def wrong(error):
    """Why an error is not a sentence; nothing if it is one. An error of the generators themselves is never one."""
    last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    if last.parent == Path(__file__).parent or last.name == "random.py":
        return f"{type(error).__name__} in {last.name}: {error}"
    if not isinstance(error, FINE) or isinstance(error, RecursionError):
        return f"{type(error).__name__}: {error}"
    text = str(error).strip()
    return f"{type(error).__name__} without a word" if not text else "" if len(text) < 2000 and text.count("\n") < 3 else f"not one sentence: {text[:200]}"


def run_case(number, seed, home):
    """One case: its kind and name, what is wrong with how it ended, or nothing, and whether it succeeded."""
    rng = random.Random(f"{seed} {number}")
    outside, folder = home / "outside", home / "inside"
    shutil.rmtree(home, ignore_errors=True)
    outside.mkdir(parents=True)
    folder.mkdir()
    make, name, fault, done = KINDS[number % len(KINDS)], "", "", False
    call = None

    def late(*_):
        raise TimeoutError("late")

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, SECONDS), signal.SIGALRM: (signal.ITIMER_REAL, WAIT)}
    before = {sign: signal.signal(sign, late) for sign in timers}
    outer = {timer: signal.setitimer(timer, seconds) for timer, seconds in timers.values()}  # that of the whole test
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()), contextlib.chdir(outside):
            warnings.simplefilter("ignore")
            name, call = make(rng, folder)
            call()
            done = True
        if "Traceback" in said.getvalue():
            fault = "a traceback on the terminal"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        fault = f"no case was made: {error!r}" if call is None else wrong(error) if str(error) != "late" else f"took more than {SECONDS:g} s of CPU, or {WAIT:g} s"
        if fault:
            fault += " | " + " <- ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(traceback.extract_tb(error.__traceback__)[-3:]))
    finally:
        for sign, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(sign, before[sign])
            signal.setitimer(timer, *outer[timer])
    if left := [p.name for p in outside.rglob("*")]:
        fault = fault or f"files outside of its folder: {left}"
    return make.__name__, name, fault, done


def trial(cases, seed=0, first=0):
    """Faults of many cases, by number; how many there were of each kind, and how many of them succeeded."""
    faults, kinds, good = {}, {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, first + cases):
            kind, name, fault, done = run_case(number, seed, Path(folder, "case"))
            kinds[kind], good[kind] = kinds.get(kind, 0) + 1, good.get(kind, 0) + done
            if fault:
                faults[number] = f"{kind}: {name[:200]}: {fault[:400]}"
                print(number, faults[number], flush=True)  # at once: a long trial may be stopped
    return faults, kinds, good


def main(args):
    start = time.monotonic()
    faults, kinds, good = trial(args.cases, args.seed, args.first)
    print(json.dumps({"cases": args.cases, "seed": args.seed, "first": args.first, "not clean": len(faults), "kinds": kinds, "succeeded": good, "seconds": round(time.monotonic() - start)}))
    return bool(faults)
