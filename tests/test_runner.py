"""Tasks in one process and in several: what fails and how, threads, transports, titles, and what travels."""

import os

import pytest
import torch
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


class Overrun(FloatingPointError):
    """An error of a library's own."""


ERRORS = [FloatingPointError("the loss is nan"), Overrun("more than the largest float"), ZeroDivisionError("division by zero"),
          OverflowError("too large"), ValueError("FloatingPointError: but only in the text"), RuntimeError("its process died")]


def fails(model, settings, state, client, number):
    if number < len(ERRORS):
        raise ERRORS[number]
    return number


@pytest.mark.parametrize("workers", [1, 2])
def test_diverged_and_raised_are_told_apart_by_the_type_of_the_error(workers):
    *failed, last = Runner(workers).run_all(tasks(fails, len(ERRORS) + 1))
    assert last == Outcome(len(ERRORS), None)
    assert [o.value for o in failed] == [None] * len(ERRORS)
    assert [o.failure.kind for o in failed] == ["diverged", "diverged", "raised", "raised", "raised", "raised"]
    assert [o.failure.reason for o in failed] == [f"{type(error).__name__}: {error}" for error in ERRORS]


def test_attempt():
    before = torch.get_num_threads()
    assert attempt(lambda: 3) == Outcome(3, None) and attempt(lambda: None) == Outcome(None, None)
    assert attempt(lambda: 1 / 0) == Outcome(None, Failure("raised", "ZeroDivisionError: division by zero"))
    assert torch.get_num_threads() == before
    with pytest.raises(KeyboardInterrupt):
        attempt(interrupt)
    assert torch.get_num_threads() == before


def interrupt(*_):
    raise KeyboardInterrupt


def threads(*_):
    return torch.get_num_threads()


def test_one_thread_each_and_threads_are_put_back():
    before = torch.get_num_threads()
    assert {o.value for w in (1, 2) for o in Runner(w).run_all(tasks(threads, 3))} == {1}
    assert torch.get_num_threads() == before
    with pytest.raises(ValueError, match=r"^workers must be >= 1, got 0$"):
        list(Runner(0).run_all(tasks(threads, 1)))


def process(*_):
    return os.getpid()


def test_a_process_for_each_core_but_one_for_a_gpu(monkeypatch):
    monkeypatch.setattr(pool, "cores", lambda: 2)
    here = {os.getpid()}

    def where(runner, n, model=None):
        return {o.value for o in runner.run_all(tasks(process, n, model))}

    assert not where(Runner(), 3) & here and not where(Runner(), 3, nn.Linear(1, 1)) & here
    elsewhere = nn.Linear(1, 1, device="meta")  # not on the CPU: as good as a GPU
    assert where(Runner(), 3, elsewhere) == here
    assert where(Runner(2), 1) == here  # a single task needs no other process
    assert list(Runner().run_all([])) == []


def test_tasks_are_done_when_they_are_asked_for():
    done = []
    outcomes = Runner(1).run_all(tasks(lambda *fields: done.append(fields[-1]), 3))
    assert done == [] and next(outcomes) == Outcome(None) and done == [0]


def test_a_transport_does_the_work_instead(monkeypatch):
    came = []

    def transport(tasks):
        came.extend(tasks)
        return (Outcome(f"{task.number}, far away") for task in tasks)

    monkeypatch.setattr(pool, "attempt", lambda _: pytest.fail("worked here"))
    monkeypatch.setattr(pool, "_in_processes", lambda *_: pytest.fail("worked here"))
    for workers in (None, 1, 2):
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
    assert packed.count((shared, first, "settings")) == packed.count((shared, second, "settings")) == 1
    assert [thing for thing in packed if len(thing) == 3 and thing[0] == "state"] == [("state", None, n) for n in range(4)]


def shared(model, settings, state, client, number):
    return model.weight.item(), settings, number
