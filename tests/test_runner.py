"""Tasks in this process and in others: what fails and how, what dies or never ends, threads, transports, titles, and what travels."""

import os
import signal
import struct
import subprocess
import sys
import threading
import time
from fcntl import F_GETFL, fcntl
from pathlib import Path

import pytest
import torch
from processes import INTERRUPTIBLE, alive
from torch import nn

from fedl2p import runner as pool
from fedl2p.bn import mix_bn
from fedl2p.digits import small_cnn
from fedl2p.runner import Failure, Outcome, Runner, Task, attempt, bar, quiet


def tasks(work, n, model=None):
    """The same work for n clients, told apart by the number of the round."""
    return [Task(work, model, None, None, None, number) for number in range(n)]


def everything(model, settings, state, client, number):
    return model, settings, state, client, number


def test_a_task_hands_its_fields_to_the_work():
    assert Task(everything, "model", "settings", "state", "client", 7).run() == ("model", "settings", "state", "client", 7)
    assert Task(everything, "model", "settings", "state", "client").run()[-1] == 0


def dies(model, settings, state, client, number):
    if number == 2:
        os._exit(3)
    return number


def test_a_dead_process_costs_one_answer():
    outcomes = list(Runner(2).run_all(tasks(dies, 5)))
    assert [o.value for o in outcomes] == [0, 1, None, 3, 4]
    assert [o.failure and o.failure.kind for o in outcomes] == [None, None, "died", None, None]
    assert "process died" in outcomes[2].failure.reason


def test_a_single_task_does_not_take_the_parent_along():
    for workers in (1, 2):
        (outcome,) = Runner(workers).run_all(tasks(dies, 3)[2:])
        assert outcome.value is None and outcome.failure.kind == "died"


def answer_pipes():
    """What this worker can write to, but for standard output and error."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if fd > 2 and os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:") and fcntl(fd, F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
                yield fd
        except OSError:  # the folder that was listed
            pass


def fault(model, settings, state, client, number):
    """The second client meets the fault in the settings; not when it is tried again, if it is to be so."""
    if number != 1:
        return number
    kind, told = settings
    if told.exists():
        return "again"
    told.write_text(str(time.monotonic()))
    if kind == "killed while it sends":
        for fd in answer_pipes():
            os.write(fd, struct.pack("<Q", 1000) + b"half")  # of a message of 1000 bytes
    if kind == "closes its pipes":
        os.closerange(3, 100)
        time.sleep(600)
    if kind == "leaves a child that holds the pipe" and not os.fork():
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("kind", ["killed", "killed while it sends", "closes its pipes", "leaves a child that holds the pipe"])
def test_a_death_is_seen_at_once_and_costs_one_process(kind, tmp_path, monkeypatch):
    list(Runner(2).run_all(tasks(process, 2)))
    born, start = [], pool._Worker.__init__
    monkeypatch.setattr(pool._Worker, "__init__", lambda self: born.append(time.monotonic()) or start(self))
    told = tmp_path / "told"
    outcomes = list(Runner(2).run_all([Task(fault, None, (kind, told), None, None, n) for n in range(4)]))
    assert outcomes == [Outcome(0), Outcome("again"), Outcome(2), Outcome(3)]
    started = time.monotonic() - born[0]  # a little more than the new process needed to start: seconds of work, and noticing is none
    assert len(born) == 1 and 0 < born[0] - float(told.read_text()) < max(10, 3 * started)  # it was 13 s and more; a machine with 25 jobs a core needed 4


def dies_soon(*_):
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return os.getpid()


def breaks(model, settings, state, client, number):
    """The first one fails when it has changed what tasks share."""
    model.weight.data += 1
    return model.weight.item() / number


def test_a_failure_in_the_middle_changes_nothing_for_the_next_client():
    model = nn.Linear(1, 1)
    failed, fine = Runner(1).run_all(tasks(breaks, 2, model))
    assert failed.failure.reason == "ZeroDivisionError: float division by zero" and fine == Outcome(model.weight.item() + 1)


def test_killed_after_its_answer_it_costs_nobody_anything():
    (first,) = Runner(1).run_all(tasks(dies_soon, 1))
    wait_until(lambda: not running(first.value))
    assert [o.value == first.value for o in Runner(1).run_all(tasks(process, 2))] == [False, False]
    (again,) = Runner(1).run_all(tasks(dies_soon, 1))  # and if it is at work for another client by then
    assert [o.value for o in Runner(1).run_all(tasks(slow, 1))] == [0] and not running(again.value)


def running(pid):
    """Whether there is such a process (and it is no zombie)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(done, seconds=300):  # on a busy machine
    limit = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.02)


def slow(model, settings, state, client, number):
    time.sleep(0.6)
    return number


class Stop(BaseException):
    """Not an Exception."""


STOPS = [SystemExit(3), GeneratorExit("g"), Stop("s"), KeyboardInterrupt("k")]


def stops(model, settings, state, client, number):
    if number < len(STOPS):
        raise STOPS[number]
    return number


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_what_would_end_the_program_is_a_failure_as_any_other(workers):
    n = len(STOPS) - (workers == 0)  # Ctrl-C is for the parent, and no worker hears it
    *failed, last = Runner(workers).run_all([*tasks(stops, n), *tasks(stops, 9)[8:]])
    assert last == Outcome(8)
    assert [o.failure for o in failed] == [Failure("raised", f"{type(stop).__name__}: {stop}") for stop in STOPS[:n]]
    if workers == 0:
        with pytest.raises(KeyboardInterrupt):
            list(Runner(0).run_all(tasks(stops, 4)[3:]))


def endless(model, settings, state, client, number):
    if number in (1, 2):
        (settings / str(number)).write_text(str(os.getpid()))
    if number == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    while number == 2:
        pass
    return number


def test_an_endless_client_is_late_and_the_others_are_not(tmp_path):
    start = time.monotonic()
    outcomes = list(Runner(2, limit=2).run_all([Task(endless, None, tmp_path, None, None, n) for n in range(7)]))
    assert time.monotonic() - start < 300
    late = Outcome(None, Failure("late", "took longer than the limit of 2 s"))
    assert outcomes == [Outcome(0), late, late, *map(Outcome, range(3, 7))]
    assert not any(running((tmp_path / name).read_text()) for name in "12")


def test_only_its_own_time_is_charged_to_a_client():
    """Not the start of its process, not the time in the queue, not what is done with the answers of others."""
    pool._retire()
    values = []
    for outcome in Runner(1, limit=5).run_all(tasks(slow, 3)):  # 0.6 s of work, also on a machine that is eight times slower
        values.append(outcome.value)
        time.sleep(3)
    assert values == [0, 1, 2]


@pytest.mark.parametrize("limit", [0, -1.0, float("nan")])
def test_limits_are_positive(limit):
    with pytest.raises(ValueError, match=f"^limit must be > 0 or None, got {limit}$"):
        Runner(limit=limit)
    assert Runner(limit=None).limit is None and Runner().limit == 3600
    assert list(Runner(1, limit=None).run_all(tasks(threads, 1))) == [Outcome(1)]


SCRIPT = """
import os, sys, time
from pathlib import Path
from fedl2p.runner import Runner, Task
def work(model, settings, state, client, number):
    print("printed", number)
    os.write(1, b"written ")
    return number, sys.stdin.read()
def ready(model, settings, state, client, number):
    Path(state).write_text("")
    time.sleep(600 if number else 0)
"""


def script(code, **kwargs):
    return subprocess.Popen([sys.executable, "-c", INTERRUPTIBLE + SCRIPT + code], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kwargs)


def test_a_script_without_a_guard_whose_clients_print_and_read():
    code = "print([o.value for o in Runner(1).run_all([Task(work, None, None, None, None, n) for n in range(2)])])"
    said, log = script(code).communicate(timeout=300)
    assert said == "[(0, ''), (1, '')]\n"
    assert all(words in log for words in ("printed 0\n", "printed 1\n", "written")) and "Traceback" not in log


@pytest.mark.parametrize("sign, code", [(signal.SIGKILL, -9), (signal.SIGINT, -2)])
def test_no_worker_outlives_its_parent(sign, code, tmp_path):
    """One of them is at work, the other has nothing to do."""
    paths = [tmp_path / "0", tmp_path / "1"]
    run = f"list(Runner(2).run_all([Task(ready, None, None, path, None, n) for n, path in enumerate({list(map(str, paths))})]))"
    parent = script(run, start_new_session=True)
    wait_until(lambda: all(path.exists() for path in paths))
    assert len(alive(parent.pid)) == 3
    parent.send_signal(sign)
    parent.communicate(timeout=300)
    assert parent.returncode == code
    wait_until(lambda: not alive(parent.pid))


def test_workers_are_kept_from_run_to_run():
    first, second = ({o.value for o in Runner(2).run_all(tasks(slow_process, 2))} for _ in range(2))
    assert first == second and len(first) == 2 and os.getpid() not in first


def slow_process(*_):
    time.sleep(0.1)
    return os.getpid()


def idle_for(monkeypatch, seconds):
    """Workers that are started from now on wait so long for work."""
    pool._retire()
    monkeypatch.setattr(pool, "_IDLE", seconds)
    monkeypatch.setattr(pool._Worker, "program", pool._Worker.program.replace("import _serve", f"import _serve, __dict__ as names; names['_IDLE'] = {seconds}"))


def test_a_fork_has_workers_of_its_own(monkeypatch):
    """As nbdev_test has: those of its parent are neither used nor ended."""
    idle_for(monkeypatch, 3600)  # the fork needs seconds to start its own, and on a busy machine minutes
    (ours,) = Runner(1).run_all(tasks(process, 1))
    read, write = os.pipe()
    if not os.fork():
        (theirs,) = Runner(1).run_all(tasks(process, 1))
        os.write(write, str(theirs.value).encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        theirs = int(pipe.read())
    assert theirs not in (ours.value, os.getpid()) and [o.value for o in Runner(1).run_all(tasks(process, 1))] == [ours.value]
    wait_until(lambda: not running(theirs))


def test_a_worker_without_work_ends(monkeypatch):
    idle_for(monkeypatch, 0.3)
    (first,) = Runner(1).run_all(tasks(process, 1))
    wait_until(lambda: not running(first.value))
    monkeypatch.undo()
    (second,) = Runner(1).run_all(tasks(process, 1))
    assert second.failure is None and second.value != first.value


def test_nobody_works_for_a_run_that_was_given_up(tmp_path):
    outcomes = Runner(2, limit=None).run_all([Task(endless, None, tmp_path, None, None, n) for n in (0, 2)])
    assert next(outcomes) == Outcome(0)
    wait_until((tmp_path / "2").exists)
    pid = int((tmp_path / "2").read_text())
    assert running(pid)
    outcomes.close()
    assert not running(pid)


def late_for_the_first(model, settings, state, client, number):
    time.sleep(0.02 * (8 - number))
    return number


def test_answers_come_in_the_order_of_the_tasks():
    for workers in (0, 1, 2):
        assert list(Runner(workers).run_all(tasks(late_for_the_first, 8))) == list(map(Outcome, range(8)))


def odd(model, settings, state, client, number):
    return [threading.Lock(), Unreadable(), number][number]


class Unreadable:
    def __reduce__(self):
        return sys.exit, ("read",)


def test_answers_that_cannot_be_sent_or_read_are_failures():
    locked, unreadable, fine = Runner(1).run_all(tasks(odd, 3))
    assert locked.failure.kind == unreadable.failure.kind == "raised" and fine == Outcome(2)
    assert "cannot pickle '_thread.lock' object" in locked.failure.reason and unreadable.failure.reason == "SystemExit: read"


def weights(model, settings, state, client, number):
    return model.weight


def biggest(model, settings, state, client, number):
    return model.weight.max().item()


def test_large_messages_travel_both_ways_and_the_model_only_once(monkeypatch):
    sizes, message = [], pool._message
    monkeypatch.setattr(pool, "_message", lambda data: sizes.append(len(data)) or message(data))
    model = nn.Linear(3600, 3600)  # 50 MB
    for _ in range(2):
        for outcome in Runner(1).run_all(tasks(weights, 2, model)):
            assert torch.equal(outcome.value, model.weight)
    assert len(sizes) == 8 and sorted(sizes)[-2] < 1000 < 50_000_000 < max(sizes)
    list(Runner(1).run_all([task._replace(work=biggest) for task in tasks(weights, 2, model)]))  # other work, the same model
    assert len(sizes) == 12 and sorted(sizes)[-2] < 1000


class Overrun(FloatingPointError):
    """An error of a library's own."""


ERRORS = [FloatingPointError("the loss is nan"), Overrun("more than the largest float"), ZeroDivisionError("division by zero"),
          OverflowError("too large"), ValueError("FloatingPointError: but only in the text"), RuntimeError("its process died")]


def fails(model, settings, state, client, number):
    if number < len(ERRORS):
        raise ERRORS[number]
    return number


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_diverged_and_raised_are_told_apart_by_the_type_of_the_error(workers):
    *failed, last = Runner(workers).run_all(tasks(fails, len(ERRORS) + 1))
    assert last == Outcome(len(ERRORS), None)
    assert [o.value for o in failed] == [None] * len(ERRORS)
    assert [o.failure.kind for o in failed] == ["diverged", "diverged", "raised", "raised", "raised", "raised"]
    assert [o.failure.reason for o in failed] == [f"{type(error).__name__}: {error}" for error in ERRORS]


@pytest.fixture
def two_threads():
    """What the work must leave as it found it; the tests themselves run with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_attempt(two_threads):
    assert attempt(lambda: 3) == Outcome(3, None) and attempt(lambda: None) == Outcome(None, None)
    assert attempt(lambda: 1 / 0) == Outcome(None, Failure("raised", "ZeroDivisionError: division by zero"))
    assert torch.get_num_threads() == 2
    with pytest.raises(KeyboardInterrupt):
        attempt(interrupt)
    assert attempt(interrupt, stoppable=False) == Outcome(None, Failure("raised", "KeyboardInterrupt: "))
    assert torch.get_num_threads() == 2


def interrupt(*_):
    raise KeyboardInterrupt


def threads(*_):
    return torch.get_num_threads()


def test_one_thread_each_and_threads_are_put_back(two_threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert {o.value for w in (0, 1, 2) for o in Runner(w).run_all(tasks(threads, 3))} == {1}
    assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match=r"^workers must be >= 0 or None, got -1$"):
        Runner(-1)


def process(*_):
    return os.getpid()


def test_a_process_for_each_core_but_none_for_a_gpu(monkeypatch):
    monkeypatch.setattr(pool, "cores", lambda: 2)
    here = {os.getpid()}

    def where(runner, n, model=None):
        return {o.value for o in runner.run_all(tasks(process, n, model))}

    assert not where(Runner(), 3) & here and not where(Runner(), 3, nn.Linear(1, 1)) & here
    elsewhere = nn.Linear(1, 1, device="meta")  # not on the CPU: as good as a GPU
    assert where(Runner(), 3, elsewhere) == here
    assert where(Runner(0), 3) == here and not where(Runner(1), 1) & here and not where(Runner(2), 1) & here
    assert list(Runner().run_all([])) == []


def test_tasks_are_done_when_they_are_asked_for():
    done = []
    outcomes = Runner(0).run_all(tasks(lambda *fields: done.append(fields[-1]), 3))
    assert done == [] and next(outcomes) == Outcome(None) and done == [0]


def test_a_transport_does_the_work_instead(monkeypatch):
    came = []

    def transport(tasks):
        came.extend(tasks)
        return (Outcome(f"{task.number}, far away") for task in tasks)

    monkeypatch.setattr(pool, "attempt", lambda _: pytest.fail("worked here"))
    monkeypatch.setattr(pool, "_in_processes", lambda *_: pytest.fail("worked here"))
    for workers in (None, 0, 2):
        asked = tasks(dies, 3)
        assert [o.value for o in Runner(workers, transport).run_all(asked)] == ["0, far away", "1, far away", "2, far away"]
        assert came[-3:] == asked


def test_a_title_for_all_that_a_runner_does():
    seen = []

    def progress(items, title, total, done):
        seen.append((title, total, done))
        return items

    plain = Runner(3, iter, progress)
    titled = plain.titled("seed 0: ft-c")
    assert list(titled.progress(iter("ab"), "scoring clients", 5, 3)) == ["a", "b"]
    assert list(plain.progress(iter("ab"), "scoring clients", 5, 3)) == ["a", "b"]
    assert seen == [("seed 0: ft-c", 5, 3), ("scoring clients", 5, 3)]
    assert (titled.workers, titled.transport) == (3, iter)


def test_progress(capsys):
    assert Runner().progress is quiet
    assert list(quiet(iter("abc"), "letters", 3, 0)) == ["a", "b", "c"] and capsys.readouterr() == ("", "")
    assert list(bar(iter("bc"), "letters", 3, 1)) == ["b", "c"]
    shown = capsys.readouterr().err
    assert "letters" in shown and "3/3" in shown


def test_what_travels_arrives():
    model = mix_bn(small_cnn(width=2), verbose=False).half()
    things = (model, torch.zeros(3, requires_grad=True), torch.zeros(2, dtype=torch.bfloat16), torch.ones(3, 4).T, nn.Parameter(torch.ones(1), False))
    copy, leaf, brain, turned, frozen = pool.pickle.loads(pool._pack(things))
    pairs = zip(model.state_dict().values(), copy.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)
    assert leaf.requires_grad and brain.dtype == torch.bfloat16 and turned.shape == (4, 3)
    assert isinstance(frozen, nn.Parameter) and not frozen.requires_grad


def test_model_and_settings_are_packed_once(monkeypatch):
    packed, pack = [], pool._pack
    monkeypatch.setattr(pool, "_pack", lambda thing: packed.append(thing) or pack(thing))
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    several = [Task(shared, model, "settings", "state", None, n) for n, model in enumerate([first, first, second, second])]
    values = [o.value for o in Runner(2).run_all(several)]
    assert values == [(model.weight.item(), "settings", n) for n, model in enumerate([first, first, second, second])]
    assert packed.count((first, "settings")) == packed.count((second, "settings")) == 1
    assert [thing for thing in packed if len(thing) == 4] == [(shared, "state", None, n) for n in range(4)]


def shared(model, settings, state, client, number):
    return model.weight.item(), settings, number
