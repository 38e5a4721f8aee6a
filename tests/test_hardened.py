"""What was found from outside: damaged files, numbers beyond reason, signals, full disks, two runs in one folder. Each failed before."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from federation import network, seen
from processes import alive
from torch import nn

from fedl2p import storage
from fedl2p.bn import mix_bn
from fedl2p.cli import main
from fedl2p.config import Config
from fedl2p.core import check_fields, check_type
from fedl2p.data import Client, Data, label_tastes, make_client
from fedl2p.digits import small_cnn
from fedl2p.learner import FedL2P
from fedl2p.metanet import MetaNets
from fedl2p.pretraining import Recipe, pretrain
from fedl2p.runner import Runner
from fedl2p.scoring import score_policy
from fedl2p.storage import claimed, load_tensors, read_json, save_tensors, write_file
from fedl2p.studies.files import read_npz, read_wav
from fedl2p.studies.models import imagenet_resnet18

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")


@pytest.fixture(scope="module")
def model():
    return mix_bn(small_cnn(width=4), verbose=False)


# --- files -----------------------------------------------------------------------------------------------------


def test_ten_saves_of_one_policy_are_the_same_bytes(model, tmp_path):
    policy, contents = FedL2P(model), set()
    for i in range(10):
        policy.save(tmp_path / f"{i}")
        contents.add((tmp_path / f"{i}").read_bytes())
    assert len(contents) == 1


def test_a_changed_exponent_is_told(tmp_path):
    path = tmp_path / "c.safetensors"
    save_tensors(path, {"w": torch.ones(4)}, {"format": "x"})
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match="c.safetensors is damaged: its content is not what was written"):
        load_tensors(path, "x")


def test_files_without_a_hash_still_load(tmp_path):
    from safetensors.torch import save_file

    save_file({"w": torch.ones(4)}, tmp_path / "old", {"format": "x", "note": "y"})
    tensors, header = load_tensors(tmp_path / "old", "x")
    assert torch.equal(tensors["w"], torch.ones(4)) and header == {"format": "x", "note": "y"}


@pytest.mark.parametrize("recipe", [Config(hidden=4), Config.paper(hidden=4)])
@pytest.mark.parametrize("notes, words", [
    ({"hidden": "20000"}, "hidden must be 4, the size of its tensors, got 20000"),
    ({"hidden": "null"}, "hidden must be a whole number, got None"),
    ({"hidden": ""}, "damaged: "),
    ({"layers": "{}"}, "layers must be a list"),
    ({"config": "[]"}, "config must be an object"),
    ({"config": '{"epochs": "many"}'}, "has a configuration that cannot be used: epochs must be a whole number, got 'many'"),
    ({"config": '{"fill": 3}'}, "fill must be a list, got 3"),
    ({"config": "[" * 100_000}, "damaged: "),
])
def test_odd_policies(model, tmp_path, recipe, notes, words):
    path = tmp_path / "p.safetensors"
    FedL2P(model, recipe).save(path)
    tensors, header = load_tensors(path, "fedl2p metanets 1", "fedl2p selector 1")
    save_tensors(path, tensors, {**header, **notes})
    with pytest.raises(ValueError) as error:
        FedL2P.load(model, path)
    assert words in str(error.value) and str(path) in str(error.value)


def test_nan_in_a_policy_is_refused(model, tmp_path):
    path = tmp_path / "p.safetensors"
    nets = MetaNets.for_model(model, lr=0.1, hidden=4)
    nets.eta_scale.data.fill_(float("nan"))
    nets.save(path)
    with pytest.raises(ValueError, match="p.safetensors: eta_scale must be finite"):
        FedL2P.load(model, path)


@pytest.mark.parametrize("rounds", [None, [None], [{"round": 1}], [{"round": "1", "val_loss": 1.0}], {"a": 1}, 3])
def test_odd_checkpoints(tmp_path, rounds):
    config = Config.paper(lr=0.05, epochs=1, rounds=1, fraction=0.5, meta_steps=1, hidden=4)
    path = tmp_path / "checkpoint.safetensors"
    FedL2P(network(), config).fit(seen()[:2], tmp_path, Runner(0))
    tensors, header = load_tensors(path, "fedl2p checkpoint 1")
    save_tensors(path, tensors, {**header, "info": json.dumps({"rounds": rounds})})
    with pytest.raises(ValueError, match="checkpoint.safetensors is damaged: .*rounds.*; delete the file to start from the beginning"):
        FedL2P(network(), config).fit(seen()[:2], tmp_path, Runner(0))
    save_tensors(path, {"now.x": torch.ones(1)}, header)
    with pytest.raises(ValueError, match="does not hold the tensors of this lambda; delete it"):
        FedL2P(network(), config).fit(seen()[:2], tmp_path, Runner(0))


def test_a_checkpoint_of_pretraining_with_other_rounds(tmp_path):
    path, recipe = tmp_path / "p.safetensors", Recipe(rounds=1, fraction=0.5)
    pretrain(small_cnn(width=4), seen()[:2], recipe, Runner(0), path)
    tensors, header = load_tensors(path, "fedl2p checkpoint 1")
    odd = {'{"round": -1}': "p.safetensors does not fit the model and rounds; delete it to start from the beginning",
           '{"round": 7}': "p.safetensors does not fit the model and rounds; delete it to start from the beginning",
           "{}": "p.safetensors is damaged: info.round is missing; delete the file to start from the beginning",
           '{"round": "x"}': "round must be a whole number, got 'x'",
           '{"round": 1, "failed": {"1": "all"}}': "failed.1 must be an object, got 'all'"}
    for info, words in odd.items():
        save_tensors(path, tensors, {**header, "info": info})
        with pytest.raises(ValueError, match=words):
            pretrain(small_cnn(width=4), seen()[:2], recipe, Runner(0), path)


def test_small_files_take_no_large_memory(tmp_path):
    path = tmp_path / "zeros.npz"
    np.savez_compressed(path, x=np.zeros(150 << 20, np.uint8))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(ValueError, match="zeros.npz is damaged .*would expand to 150 MB"):
        read_npz(path)


def test_a_large_json_file_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text("[1, 2, 3]")
    monkeypatch.setattr(storage, "_JSON_BYTES", 5)
    with pytest.raises(ValueError, match="a.json is damaged .file must be a regular file of at most 0 MB, got 9"):
        read_json(tmp_path / "a.json")


def test_junk_for_weights_and_sounds(tmp_path):
    junk = tmp_path / "junk.pt"
    for content in (b"", b"junk", b"PK\x03\x04junk"):
        junk.write_bytes(content)
        with pytest.raises(ValueError, match="junk.pt cannot be read as a state dict"):
            imagenet_resnet18(weights=junk)
    torch.save([1, 2], junk)
    with pytest.raises(ValueError, match="junk.pt must hold a state dict of names and tensors, got list"):
        imagenet_resnet18(weights=junk)
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    with pytest.raises(ValueError, match=r"a.wav is damaged or not a wav file \(.+\); download it again"):
        read_wav(tmp_path / "a.wav", 16000)


# --- numbers beyond reason -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong, words", [
    ({"epochs": 10**30}, "epochs must be <= 100000, got 1000000000000000000000000000000"),
    ({"hidden": 10**20}, "hidden must be <= 4096"), ({"seed": 2**32}, "seed must be <= 4.29497e+09"), ({"seed": -1}, "seed must be >= 0, got -1"),
    ({"rounds": 10**9}, "rounds must be <= 1e+06"), ({"lr": "0.1"}, "lr must be a number, got '0.1'"), ({"epochs": 1.5}, "epochs must be a whole number, got 1.5"),
    ({"epochs": True}, "epochs must be a whole number, got True"), ({"fill": "x"}, "fill must be a list, got 'x'"), ({"fill": ("x",)}, "fill[0] must be a number"),
    ({"meta_lr_bn": float("nan")}, "meta_lr_bn must be >= 0 and finite, got nan"), ({"meta_lr_lr": "x"}, "meta_lr_lr must be a number"), ({"meta_lr_scale": -1}, "meta_lr_scale must be >= 0 and finite"),
    ({"mean": "mode"}, "mean must be one of mean, median, trimmed"),
])
def test_settings_have_bounds(wrong, words):
    with pytest.raises(ValueError) as error:
        Config(**wrong)
    assert words in str(error.value)


@pytest.mark.parametrize("args, words", [
    (["demo", "--workers", "99999999999999999999"], "workers must be <= 1024"), (["demo", "--seeds", "99999999999999999999"], "seeds must be 1000 at most, each < 2**32"),
    (["demo", "--alpha", "1e-320"], "alpha must be in [1e-06, 1e+06]"), (["demo", "--hidden", "99999999999999999999"], "hidden must be <= 4096"),
    (["demo", "--meta-lr-bn", "nan"], "meta_lr_bn must be >= 0 and finite, got nan"), (["demo", "--pretraining-rounds", "99999999999"], "pretraining_rounds must be <= 1000000"),
    (["run", "office", "--workers", "99999999999999999999"], "workers must be <= 1024"), (["run", "office", "--workers", "-1"], "workers must be >= 0 or None, got -1"),
    (["run", "office", "--seeds", "99999999999999999999"], "seeds must be 1000 at most"), (["run", "office", "--epochs", "99999999999999999999"], "epochs must be <= 100000"),
    (["run", "cifar10", "--alpha", "1e-320"], "alpha must be in [1e-06, 1e+06]"), (["flower", "cifar10", "--workers", "-1"], "workers must be >= 0 or None, got -1"),
])
def test_options_have_bounds(args, words, tmp_path, capsys):
    try:
        code = main([*args, "--out", str(tmp_path / "out")])
    except SystemExit as stop:
        code = stop.code
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert code in (1, 2) and words in said and "Traceback" not in said and not (tmp_path / "out").exists()


def test_other_numbers_beyond_reason():
    with pytest.raises(ValueError, match="workers must be <= 1024"):
        Runner(10**20)
    with pytest.raises(ValueError, match="alpha must be >= 1e-300"):
        label_tastes(3, 3, 1e-320)
    for share in (-1, 1, 2, float("nan")):
        with pytest.raises(ValueError, match=r"share must be in \[0, 1\)"):
            make_client("a", Data(torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64)), share=share)
    for wrong in ({"rounds": -1}, {"lr": -1.0}, {"rounds": 10**20}, {"drops": "x"}):
        with pytest.raises(ValueError):
            Recipe(**wrong)


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = small_cnn(width=4)

    def forward(self, x):
        return self.net(x).detach()


def test_silent_nonsense_is_said():
    with pytest.raises(ValueError, match="ids of clients must be all different"):
        FedL2P(network(), Config.paper(hidden=4)).score([seen()[0]] * 2, Runner(0))
    learner = FedL2P(Detached(), Config.paper(lr=0.05, epochs=1, hidden=4))
    with pytest.raises(ValueError, match="does not depend on .*; does the model detach its output?"):
        score_policy(learner.model, learner.config, learner.metanets.state_dict(), seen()[0])
    large = replace(seen()[0], train=Data(seen()[0].train.x * 1e30, seen()[0].train.y))
    with pytest.raises(ValueError, match="not finite; x has values up to"):
        FedL2P(network(), Config.paper(hidden=4)).strategy(large)


@pytest.mark.parametrize("part", ["train", "val", "test"])
@pytest.mark.parametrize("wrong", [None, [], torch.zeros(3)])
def test_a_client_of_something_else_than_data(part, wrong):
    """It was found when the client was used: unsupported operand type(s) for +."""
    good = Data(torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="^train, val and test must be Data, got <class"):
        Client("a", **{**dict.fromkeys(("train", "val", "test"), good), part: wrong})


def test_a_model_without_parameters():
    for use in (FedL2P, lambda model: pretrain(model, seen()[:2], Recipe(rounds=1), Runner(0))):
        with pytest.raises(ValueError, match="model must have parameters, got none"):
            use(nn.Flatten())


def test_types_all_the_way_down():
    check_type({"a": [1, 2.5]}, dict[str, list[float]])
    for value, hint, words in ((10**400, float, "must be a number"), (True, int, "must be a whole number"), ({"a": [None]}, dict[str, list[int]], r"^a\[0\] must be a whole number, got None"), ([{}], list[str], r"^\[0\] must be text")):
        with pytest.raises(ValueError, match=words):
            check_type(value, hint)
    check_fields(Recipe(rounds=np.int64(3)))


# --- one run in a folder, signals, disks -------------------------------------------------------------------------


@linux
def test_a_second_run_in_a_folder_says_so_and_stops(tmp_path, capsys):
    with claimed(tmp_path / "out"):
        assert main(["demo", "--out", str(tmp_path / "out"), "--seeds", "0"]) == 1
    assert f"another run is using {tmp_path / 'out'}; wait until it ends or choose another folder" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())
    with claimed(tmp_path), pytest.raises(RuntimeError, match="another run is using"):
        FedL2P(network()).fit(seen(), tmp_path, Runner(0))


@linux
def test_half_files_of_the_dead_are_swept(tmp_path):
    (tmp_path / "sub").mkdir()
    mine, others = tmp_path / "sub" / "a.json.123.part", [tmp_path / "film.part", tmp_path / "a.123.part.txt"]
    for path in (mine, *others):
        path.write_text("x")
    with claimed(tmp_path):
        assert not mine.exists() and all(path.exists() for path in others)


def demo(out, before=""):
    code = f"{before}\nimport sys; from fedl2p import command; sys.exit(command())"
    args = ["demo", "--out", str(out), "--seeds", "3", "--clients", "5", "--unseen", "0", "--pretraining-rounds", "40", "--workers", "2"]
    return subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


@linux
def test_a_run_has_nothing_in_shared_memory(tmp_path):
    """Semaphores there outlive a process group that is killed; the workers talk by pipes, and have none."""
    process = demo(tmp_path / "out")
    while not list((tmp_path / "out").rglob("fedavg*.safetensors")) and process.poll() is None:
        time.sleep(0.05)
    everybody = alive(process.pid)
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in everybody]
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=300)
    assert len(everybody) == 3 and not any("/dev/shm/" in text for text in maps)


@linux
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_end_as_ctrl_c_does(sign, tmp_path):
    default = f"import signal; signal.signal({int(sign)}, signal.SIG_DFL)"
    process = demo(tmp_path / "out", default)
    while not list((tmp_path / "out").rglob("fedavg*.safetensors")) and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, sign)
    said = process.communicate(timeout=300)[1]
    assert process.returncode == 128 + sign, said
    assert "stopped; finished work is kept, and the same command resumes from there" in said and "Traceback" not in said and "leaked" not in said
    end = time.monotonic() + 300
    while alive(process.pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert not alive(process.pid) and not list(tmp_path.rglob("*.part"))


def test_ctrl_c_during_imports_is_no_traceback(tmp_path):
    stops = "import sys\nclass Stop:\n    def find_spec(self, name, *more):\n        if name == 'fedl2p.cli': raise KeyboardInterrupt\nsys.meta_path.insert(0, Stop())"
    process = demo(tmp_path / "out", stops)
    said = process.communicate(timeout=300)[1]
    assert process.returncode == 130 and said.strip() == "stopped before it began"


def test_a_full_disk_and_a_read_only_folder_are_said(tmp_path, monkeypatch, capsys):
    """/dev/full has no space; root may write anywhere, so a file where the folder should be stands in for one."""
    if Path("/dev/full").exists():
        with pytest.raises(OSError, match="No space left"), open("/dev/full", "wb") as file:
            file.write(b"x" * 10**6)

    def full(self, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "a", b"x")
    assert not list(tmp_path.iterdir())
    assert main(["demo", "--out", str(tmp_path / "out"), "--seeds", "0"]) == 1
    assert "No space left on device" in capsys.readouterr().err
    monkeypatch.undo()
    (tmp_path / "file").write_text("x")
    assert main(["demo", "--out", str(tmp_path / "file" / "out"), "--seeds", "0"]) == 1
    assert "out must be a folder to write in" in capsys.readouterr().err


DEMO = ["demo", "--seeds", "0", "--clients", "5", "--unseen", "0", "--pretraining-rounds", "1", "--epochs", "1", "--rounds", "1", "--estimator", "fomaml", "--workers", "0"]


def test_a_disk_that_fills_up_in_the_middle(tmp_path, capsys):
    """No file may have more than some bytes: small ones are written, and then one is not."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, limits[1]))
    try:
        code = main([*DEMO, "--out", str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert code == 1 and "File too large" in said and "Traceback" not in said
    assert (tmp_path / "out" / "config.json").exists() and not list(tmp_path.rglob("*.part"))


@linux
def test_a_folder_that_may_only_be_read(capsys):
    """Root may write anywhere, and becomes somebody else for a while."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        before = os.geteuid()
        if before == 0:
            os.seteuid(65534)
        try:
            code = main([*DEMO, "--out", str(Path(folder, "out"))])
        finally:
            os.seteuid(before)
        assert code == 1 and "out must be a folder to write in" in (said := capsys.readouterr().err) and "Traceback" not in said
        assert not list(Path(folder).iterdir())


def dies_of_memory(model, settings, state, client, number):
    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out


def test_a_worker_killed_for_memory_costs_its_client_only():
    from fedl2p.runner import Task

    tasks = [Task(dies_of_memory, None, None, None, seen()[0]), Task(len_of, None, None, None, seen()[1])]
    first, second = Runner(2).run_all(tasks)
    assert first.failure.kind == "died" and "memory" in first.failure.reason and second.value == len(seen()[1].train)


def len_of(model, settings, state, client, number):
    return len(client.train)


def test_a_clock_that_jumps_changes_no_wait(monkeypatch):
    """Limits are counted by a clock that nobody sets."""
    pytest.importorskip("flwr", reason='the extra "flower" is not installed')
    from fedl2p import flower

    jumps = iter(range(0, 10**9, 10**6))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))

    class Nobody:
        def get_node_ids(self):
            return []

    start = time.monotonic()
    with pytest.raises(RuntimeError, match="no node gave its name in 0.3 s; 0 were asked"):
        flower.Nodes(Nobody()).clients(1, 0.3)
    assert time.monotonic() - start >= 0.3


def test_a_clock_that_jumps_gives_no_negative_time(tmp_path, monkeypatch):
    """A cell's seconds were the difference of two times of day."""
    back = iter(range(10**9, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(back)))
    assert main([*DEMO, "--out", str(tmp_path / "out")]) == 0
    cells = [json.loads(path.read_text()) for path in (tmp_path / "out").rglob("*-seed0.json")]
    assert cells and all(0 <= cell[name] < 600 for cell in cells for name in ("seconds", "pretraining_seconds"))


def test_what_is_left_out_of_a_report_is_listed(tmp_path):
    from fuzz.cases import CELL

    from fedl2p.report import write_report

    home = tmp_path / "office" / "smoke" / "imagenet-alpha1000-e5"
    home.mkdir(parents=True)
    for method, change in {"none": {}, "fedl2p": {"clients": [{"n": "<script>"}]}, "ft-c": {"seed": None}}.items():
        (home / f"{method}-seed0.json").write_text(json.dumps({**CELL, "rounds": [], "method": method, **change}))
    with pytest.warns(RuntimeWarning, match="fedl2p-seed0.json is damaged"):
        text = write_report([tmp_path]).read_text()
    assert "fedl2p-seed0.json is damaged (clients[0].client is missing)" in text and "ft-c-seed0.json is damaged (seed must be a whole number, got None)" in text
    assert "<script" not in text and "no fine-tuning" in text
    shutil.rmtree(tmp_path / "report")
