"""Rounds of learning: records, the best lambda, its last judgement, and folders to go on from."""

import json
from dataclasses import replace

import pytest
import torch

import fedl2p.rounds
import fedl2p.storage
from fedl2p.client import validate_client
from fedl2p.config import Config
from fedl2p.digits import digits_federation, small_cnn
from fedl2p.federated import EMPTY_ROUNDS, Diverged, Round
from fedl2p.learner import FedL2P
from fedl2p.rounds import Course, _loss, _record, describe_client
from fedl2p.runner import Failure, Outcome, Runner, attempt

QUICK = Config.paper(lr=0.05, epochs=1, rounds=3, fraction=0.5, meta_steps=1)


def same(a: FedL2P, b: FedL2P) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.metanets.state_dict().values(), b.metanets.state_dict().values(), strict=True))


def test_it_says_when_nothing_was_kept(model, federation):
    with pytest.warns(RuntimeWarning, match="as they started"):
        learner = FedL2P(model, replace(QUICK, rounds=1)).fit(federation.seen, runner=Runner(0))
    assert same(learner, FedL2P(model, QUICK))


def test_paired_rule_chooses_by_the_difference():
    reports = {"a": {"val_loss": 0.3, "start_loss": 0.5, "diverging": 0}, "b": {"val_loss": 0.9, "start_loss": 0.9, "diverging": 0}}
    assert _loss(_record(Round(1, {}, reports, {}))) == pytest.approx(0.6 - 0.7)


def test_patience(model, federation):
    still = replace(QUICK, rounds=30, patience=2, meta_lr_bn=0.0, meta_lr_lr=0.0, meta_lr_scale=0.0, fraction=1.0, estimator="fomaml")
    *losses, last = [r["val_loss"] for r in FedL2P(model, still).fit(federation.seen, runner=Runner(0)).history]
    assert len(losses) < 30 and losses.index(min(losses)) == len(losses) - 3


def test_who_diverges_is_left_out_and_counted():
    """Told by the kind of the failure: its text may say anything."""
    reports, text = {"a": {"val_loss": 0.1, "diverging": 0}}, "FloatingPointError: the loss is nan"
    for kind in ("raised", "died", "refused", "diverged"):
        record = _record(Round(1, {}, reports, {"b": Failure(kind, text)}))
        assert record["val_loss"] == 0.1 and record["diverged"] == (kind == "diverged")
    assert _record(Round(1, {}, {}, {"b": Failure("raised", "ValueError: train is empty")}))["val_loss"] is None


def test_a_record_of_a_round_is_plain_json():
    reports = {id: {"val_loss": loss, "beta": [loss, 0.0], "eta": [0.1], "diverging": 2} for id, loss in {"a": 0.25, "b": 0.75}.items()}
    record = _record(Round(7, {}, reports, {"c": Failure("died", "its process died")}))
    assert json.loads(json.dumps(record)) == record == {
        "round": 7, "val_loss": 0.5, "beta": [0.5, 0.0], "eta": [pytest.approx(0.1)], "clients": ["a", "b"],
        "failed": {"c": "its process died"}, "diverged": 0, "diverging": 4}


def test_a_course_keeps_the_lambda_that_was_sent():
    """The losses of a round are those of the lambda before it."""
    def after(course, number, loss):
        reports = {"a": {"val_loss": loss, "diverging": 0}} if loss is not None else {}
        return course.after(Round(number, {"lambda": number}, reports, {}), "lowest")

    course = Course({"lambda": 0}, {"lambda": 0}, [])
    assert not course.tired(1)
    best, tired = [], []
    for number, loss in enumerate([0.9, 0.5, None, 0.5, 0.7], start=1):
        course = after(course, number, loss)
        best.append(course.best["lambda"])
        tired.append(course.tired(2))
    assert best == [0, 1, 1, 1, 1] and tired == [False, False, False, True, True] and course.now == {"lambda": 5}
    assert [record["round"] for record in course.history] == [1, 2, 3, 4, 5]


def test_other_clients_do_not_go_on(model, federation, tmp_path):
    FedL2P(model, QUICK).fit(federation.seen, tmp_path, Runner(0))
    with pytest.raises(ValueError, match="model and clients was"):
        FedL2P(model, QUICK).fit(digits_federation(5, 5, alpha=0.1, size=30).seen, tmp_path, Runner(0))


@pytest.mark.parametrize("inputs", ["raw", "standard"])
def test_learning_that_was_stopped_goes_on(model, federation, tmp_path, inputs):
    config = replace(QUICK, inputs=inputs, keep="paired")
    whole = FedL2P(model, config).fit(federation.seen, runner=Runner(0))

    def stop(rounds, title, total, done):
        yield next(rounds)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FedL2P(model, config).fit(federation.seen, tmp_path, Runner(0, progress=stop))
    again = FedL2P(model, config).fit(federation.seen[::-1], tmp_path, Runner(2))
    assert same(whole, again) and again.history == whole.history
    assert [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()] == whole.history


@pytest.mark.filterwarnings("ignore:no round had a lower validation loss than the first")
@pytest.mark.parametrize("config", [replace(QUICK, inputs="standard", rounds=1), Config(epochs=1, splits=1, choosing_rounds=1)], ids=["standard", "trials"])
def test_a_client_with_huge_inputs_does_not_move_the_center(model, federation, config):
    """The center is a mean, but of bounded steps: otherwise one client would decide what all others look like."""
    first = federation.seen[0].id

    def learned(huge):
        def transport(tasks):
            for task in tasks:
                outcome = attempt(task.run)
                if task.work is describe_client and task.client.id == first and huge:
                    state = {k: torch.full_like(t, huge) for k, t in outcome.value.state.items()}
                    outcome = outcome._replace(value=outcome.value._replace(state=state | {"square": state["mean"]**2}))
                yield outcome

        return FedL2P(model, config).fit(federation.seen, runner=Runner(transport=transport)).metanets

    honest = learned(0.0)
    with pytest.warns(RuntimeWarning, match=f"'{first}'"):
        moved = learned(1e20)
    assert (moved.center - honest.center).abs().max() < honest.center.abs().max()
    assert moved.deviation.max() < 100 * honest.deviation.max()


@pytest.mark.parametrize("when", range(1, 9))
def test_a_run_that_was_killed_between_two_files_goes_on_to_the_same_ones(model, federation, tmp_path, monkeypatch, when):
    """Three rounds and their judgement write two files each; a kill before any of the eight leaves nothing behind at the end."""
    written, write = [], fedl2p.storage.write_file

    def kill(path, content):
        written.append(path)
        if len(written) == when:
            raise KeyboardInterrupt
        write(path, content)

    whole = FedL2P(model, QUICK).fit(federation.seen, tmp_path / "whole", Runner(0))
    for module in (fedl2p.storage, fedl2p.rounds):
        monkeypatch.setattr(module, "write_file", kill)
    with pytest.raises(KeyboardInterrupt):
        FedL2P(model, QUICK).fit(federation.seen, tmp_path / "killed", Runner(0))
    assert same(whole, FedL2P(model, QUICK).fit(federation.seen, tmp_path / "killed", Runner(0))) and len(written) >= 8
    for name in ("checkpoint.safetensors", "rounds.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_checkpoint_of_another_model_or_damaged(model, federation, tmp_path):
    FedL2P(model, QUICK).fit(federation.seen, tmp_path, Runner(0))
    with pytest.raises(ValueError, match="model and clients was"):
        FedL2P(small_cnn(width=4, seed=5), QUICK).fit(federation.seen, tmp_path, Runner(0))
    assert [json.loads(line)["round"] for line in (tmp_path / "rounds.jsonl").read_text().splitlines()] == [1, 2, 3, 4]
    (tmp_path / "checkpoint.safetensors").write_bytes(b"oops")
    with pytest.raises(ValueError, match="delete the file"):
        FedL2P(model, QUICK).fit(federation.seen, tmp_path, Runner(0))


def test_a_finished_run_is_not_run_again(model, federation, tmp_path):
    first = FedL2P(model, QUICK).fit(federation.seen, tmp_path, Runner(0))

    def watch(rounds, title, total, done):
        return iter(list(rounds) and pytest.fail("ran again") or ())

    second = FedL2P(model, QUICK).fit(federation.seen, tmp_path, Runner(0, progress=watch))
    assert same(first, second) and first.history == second.history


def test_a_first_round_without_answers_can_be_kept(model, federation, tmp_path):
    """Then the best lambda is the one that was there, and both are written into one file."""
    wild = replace(QUICK, lr=1e30, fraction=0.5)
    with pytest.raises(Diverged, match="FloatingPointError"), pytest.warns(RuntimeWarning, match="is left out"):
        FedL2P(model, wild).fit(federation.seen, tmp_path, Runner(0))
    records = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert len(records) == EMPTY_ROUNDS - 1 == 2  # the third empty round in a row is an error
    assert all(reason.startswith("FloatingPointError: ") for record in records for reason in record["failed"].values())


def test_the_last_judgement_is_that_of_the_next_round(model, federation):
    """With one round more, that round's losses are what the last judgement said."""
    for keep in ("lowest", "paired"):
        config = replace(QUICK, keep=keep)
        short = FedL2P(model, config).fit(federation.seen, runner=Runner(0)).history
        more = FedL2P(model, replace(config, rounds=config.rounds + 1)).fit(federation.seen, runner=Runner(0)).history
        for name in ("val_loss", "clients", "beta", "eta", *(["start_loss"] if keep == "paired" else [])):
            assert short[-1][name] == more[-2][name]


def test_a_finished_folder_is_judged_once(model, federation, tmp_path):
    whole = FedL2P(model, QUICK).fit(federation.seen, tmp_path, Runner(0))

    def refuse(tasks):
        raise AssertionError("nothing is left to do")

    again = FedL2P(model, QUICK).fit(federation.seen, tmp_path, Runner(transport=refuse))
    assert same(whole, again) and again.history == whole.history and len(whole.history) == QUICK.rounds + 1


def test_all_diverge_at_the_end(model, federation):
    """That is a bad last lambda, not the end of the run."""
    def transport(tasks):
        failed = Outcome(None, Failure("diverged", "the loss is nan"))
        return (failed if task.work is validate_client else attempt(task.run) for task in tasks)

    with pytest.warns(RuntimeWarning, match="is left out: the loss is nan"):
        learner = FedL2P(model, replace(QUICK, fraction=1.0)).fit(federation.seen, runner=Runner(transport=transport))
    assert learner.history[-1]["val_loss"] is None and learner.history[-1]["diverged"] == len(federation.seen)


def test_a_learner_that_is_interrupted_stays_as_it_was(model, federation):
    learner = FedL2P(model, QUICK).fit(federation.seen, runner=Runner(0))
    before = learner.metanets, learner.history, learner.trials, learner.last_state

    def stop(rounds, title, total, done):
        yield next(rounds)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learner.fit(federation.seen, runner=Runner(0, progress=stop))
    after = learner.metanets, learner.history, learner.trials, learner.last_state
    assert all(a is b for a, b in zip(after, before, strict=True))


def test_patience_counts_by_the_paired_difference():
    """Each round has other clients: raw losses rise because later ones are harder, and lambda still gets better."""
    def records(pairs):
        reports = [{"a": {"val_loss": after, "start_loss": before, "diverging": 0}} for before, after in pairs]
        course = Course({}, {}, [])
        for number, report in enumerate(reports, start=1):
            course = course.after(Round(number, {"lambda": number}, report, {}), "paired")
        return course

    better = records([(0.5, 0.5), (0.9, 0.8), (1.5, 1.2), (2.0, 1.5)])
    assert [r["val_loss"] for r in better.history] == [0.5, 0.8, 1.2, 1.5] and not better.tired(1)
    worse = records([(2.0, 1.5), (1.5, 1.2), (0.9, 0.8), (0.5, 0.5)])
    assert worse.tired(3) and not worse.tired(4)
