"""Measuring: a process that measures and ends, counters, turns, wrong arguments."""

import os
import sys

import pytest
import torch

from fedl2p.measure import count_flops, peak_memory, seconds

linux = pytest.mark.skipif(sys.platform != "linux", reason="peaks can be started anew on Linux only")


@linux
def test_a_known_allocation_in_a_process_that_has_ended(tmp_path):
    def work():
        with open(tmp_path / "pids", "a") as file:
            file.write(f"{os.getpid()}\n")
        print("a function may print")
        torch.ones(10_000_000)

    assert peak_memory(work) == pytest.approx(40, abs=2)
    first, second = map(int, (tmp_path / "pids").read_text().split())
    assert first == second != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


@linux
def test_a_function_that_fails_in_its_process_says_why():
    with pytest.raises(RuntimeError, match="separate process: ZeroDivisionError: division by zero"):
        peak_memory(lambda: 1 / 0)


def test_memory_that_cannot_be_known_is_none(monkeypatch, tmp_path):
    assert peak_memory(lambda: None, "meta") is None
    monkeypatch.setattr("fedl2p.measure._RESET", tmp_path / "no such file")
    assert peak_memory(lambda: None) is None


def test_the_counter_ends_with_the_call():
    with pytest.raises(ZeroDivisionError):
        count_flops(lambda: 1 / 0)
    x = torch.ones(3, 4)
    assert count_flops(lambda: x @ x.T) == 2 * 3 * 3 * 4
    assert count_flops(lambda: x + x) == 0


def test_functions_take_turns_after_one_call_that_does_not_count():
    order = []
    took = seconds({name: lambda name=name: order.append(name) for name in "ab"}, repeats=2)
    assert "".join(order) == "ababab"
    assert list(took) == ["a", "b"] and took["a"].ratio == 1 and took["b"].seconds > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: seconds({}), "number of functions must be >= 1, got 0"),
        (lambda: seconds({"a": int}, repeats=0), "repeats must be >= 1, got 0"),
        (lambda: peak_memory(3), "function must be callable, got 3"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
