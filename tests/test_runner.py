"""Work on several processes: one that dies, threads, and what travels."""

import os

import pytest
import torch
from torch import nn

from fedl2p import runner as pool
from fedl2p.bn import mix_bn
from fedl2p.digits import small_cnn
from fedl2p.runner import each


def dies(n):
    if n == 2:
        os._exit(3)
    return n


def test_a_dead_process_costs_one_answer():
    outcomes = list(each(dies, [(n,) for n in range(5)], workers=2))
    assert [o.value for o in outcomes] == [0, 1, None, 3, 4] and "process died" in outcomes[2].error


def threads(_):
    return torch.get_num_threads()


def test_one_thread_each_and_threads_are_put_back():
    before = torch.get_num_threads()
    assert {o.value for w in (1, 2) for o in each(threads, [(0,)] * 3, workers=w)} == {1}
    assert torch.get_num_threads() == before
    with pytest.raises(ValueError, match="workers is 0"):
        list(each(threads, [(0,)], workers=0))


def test_what_travels_arrives():
    model = mix_bn(small_cnn(width=2), verbose=False).half()
    things = (model, torch.zeros(3, requires_grad=True), torch.zeros(2, dtype=torch.bfloat16), torch.ones(3, 4).T, nn.Parameter(torch.ones(1), False))
    there = pool.pickle.loads(pool._pack(things))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(model.state_dict().values(), there[0].state_dict().values(), strict=True))
    assert there[1].requires_grad and there[2].dtype == torch.bfloat16 and there[3].shape == (4, 3) and isinstance(there[4], nn.Parameter) and not there[4].requires_grad
