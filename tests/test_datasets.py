"""Loaders of real data sets, on small files in the official layouts: what is missing, damaged, hostile or out of date."""

import hashlib
import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import image, wav

from fedl2p.data import label_counts
from fedl2p.studies import datasets
from fedl2p.studies.corruptions import CORRUPTIONS
from fedl2p.studies.datasets import (
    CIFAR_MEAN,
    CIFAR_STD,
    DOMAINNET_CLASSES,
    DOMAINNET_DOMAINS,
    OFFICE_CLASSES,
    SPEECH_CLASSES,
    cifar10,
    cifar10c,
    domainnet,
    office,
    speech,
)

PARTS = ("train", "val", "test")


def sizes(client):
    return [len(getattr(client, part)) for part in PARTS]


def same(one, other):
    """Whether two lists of clients are equal to the last bit."""
    return [(c.id, c.domain) for c in one] == [(c.id, c.domain) for c in other] and all(
        torch.equal(getattr(getattr(a, part), v), getattr(getattr(b, part), v))
        for a, b in zip(one, other, strict=True) for part in PARTS for v in "xy")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Whoever tries to download fails the test, unless the test puts something else here."""
    def refuse(*_, **__):
        raise AssertionError("a download was attempted")
    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", refuse)
    monkeypatch.setattr("urllib.request.urlopen", refuse)


# --- CIFAR-10 ---


def toy_cifar(n, seed=0):
    """Images whose first pixel is their own number, so that each can be recognised."""
    x = np.random.default_rng(seed).integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)
    x[:, 0, 0, 0], x[:, 0, 0, 1] = np.arange(n) // 256, np.arange(n) % 256
    return x, (np.arange(n) % 10).astype(np.uint8)


def numbers(x):
    """The numbers of the images in a tensor of standardised ones."""
    raw = (x[:, 0, 0, :2] * CIFAR_STD[0] + CIFAR_MEAN[0]).mul(255).round().long()
    return (raw[:, 0] * 256 + raw[:, 1]).tolist()


@pytest.fixture
def cifar(tmp_path):
    (x, y), (x_test, y_test) = toy_cifar(600), toy_cifar(300, 1)
    np.savez(tmp_path / "cifar10.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    return tmp_path


def test_cifar10_sizes_and_every_image_once(cifar):
    clients = cifar10(cifar, 12, 0.3, size=50, test_size=10, download=False)
    assert [c.id for c in clients] == [f"cifar10-{i}" for i in range(12)] and {c.domain for c in clients} == {""}
    assert {tuple(sizes(c)) for c in clients} == {(40, 10, 10)}
    assert sorted(n for c in clients for n in numbers(c.train.x) + numbers(c.val.x)) == list(range(600))
    test = [n for c in clients for n in numbers(c.test.x)]
    assert len(set(test)) == 120 and len(test) == 120
    for c in clients:
        for part in PARTS:
            data = getattr(c, part)
            assert data.x.dtype == torch.float32 and data.y.tolist() == [n % 10 for n in numbers(data.x)]
            assert data.x.untyped_storage().nbytes() == data.x.numel() * 4  # a copy of its own samples, no view of all


def test_cifar10_same_seed_same_clients(cifar):
    first = cifar10(cifar, 6, 0.5, seed=3, size=20, test_size=5, download=False)
    assert same(first, cifar10(cifar, 6, 0.5, seed=3, size=20, test_size=5, download=False))
    assert not same(first, cifar10(cifar, 6, 0.5, seed=4, size=20, test_size=5, download=False))


def test_cifar10_subset_has_equal_classes(cifar):
    assert label_counts(cifar10(cifar, 5, 1.0, size=20, test_size=4, download=False)).sum(0).tolist() == [12] * 10


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1000.0])
def test_cifar10_test_labels_follow_training_labels(cifar, alpha):
    for c in cifar10(cifar, 6, alpha, size=100, test_size=50, download=False):
        train = torch.bincount((c.train + c.val).y, minlength=10) / 100
        assert (train - torch.bincount(c.test.y, minlength=10) / 50).abs().sum() / 2 < 0.15


@given(st.integers(1, 12), st.integers(1, 15), st.integers(0, 3), st.integers(2, 10))
@settings(max_examples=60, deadline=None)
def test_follow_deals_every_sample_once_and_equally(n_clients, each, seed, classes):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n_clients * each)  # not at all balanced
    counts = rng.integers(0, 5, (n_clients, classes)) + np.eye(n_clients, classes, dtype=int)[:, ::-1]
    counts[:, 0] += counts.sum(1) == 0
    hands = datasets._follow(y, counts, torch.Generator().manual_seed(seed))
    assert {len(hand) for hand in hands} == {each}
    assert sorted(np.concatenate(hands)) == list(range(len(y)))


@pytest.mark.parametrize("options, words", [
    (dict(n_clients=100), r"number of train images \(n_clients \* 50\) must be from 10, one for each class, to 600, all there are, got 5000"),
    (dict(n_clients=10, test_size=31), r"number of test images \(n_clients \* 31\) must be .*, got 310"),
    (dict(n_clients=2, test_size=4), "must be from 10, one for each class, to 300, all there are, got 8"),
    (dict(n_clients=0), "number of train images .* got 0"),
])
def test_cifar10_more_than_there_is(cifar, options, words):
    with pytest.raises(ValueError, match=words):
        cifar10(cifar, download=False, **options)


def test_cifar10_missing_says_what_to_put_where(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"cifar-10-batches-bin does not exist; pass download=True, or unpack .*cifar-10-binary.tar.gz in"):
        cifar10(tmp_path, download=False)


def test_failed_download_is_explained(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("no route to host")
    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", fail)
    with pytest.raises(FileNotFoundError, match="could not be downloaded .no route to host.; unpack it in"):
        cifar10(tmp_path)


def write_batches(root, monkeypatch):
    """Small files in the layout of the binary version, with their checksums in place of the official ones."""
    folder, md5s = root / "cifar-10-batches-bin", {}
    folder.mkdir(parents=True)
    for i, name in enumerate(datasets.CIFAR10_BATCHES):
        x, y = toy_cifar(40, i)
        raw = np.concatenate([y[:, None], x.reshape(40, -1)], 1).tobytes()
        (folder / f"{name}.bin").write_bytes(raw)
        md5s[name] = hashlib.md5(raw).hexdigest()[:8]
    monkeypatch.setattr(datasets, "CIFAR10_BATCHES", md5s)
    return folder


def test_cifar10_binary_version_is_downloaded_once_and_cached(tmp_path, monkeypatch):
    calls = []

    def pretend(url, root, md5, remove_finished):
        calls.append((url, md5))
        write_batches(tmp_path, monkeypatch)
    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", pretend)
    first = cifar10(tmp_path, 4, size=50, test_size=10)
    assert calls == [("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530")]
    assert sorted(os.listdir(tmp_path)) == ["cifar-10-batches-bin", "cifar10.npz"]
    for path in (tmp_path / "cifar-10-batches-bin").iterdir():
        path.unlink()
    assert same(first, cifar10(tmp_path, 4, size=50, test_size=10, download=False)) and len(calls) == 1
    with np.load(tmp_path / "cifar10.npz") as arrays:
        assert {name: arrays[name].shape[0] for name in arrays} == {"x_train": 200, "y_train": 200, "x_test": 40, "y_test": 40}


def test_cifar10_damaged_batch_is_named_and_not_cached(tmp_path, monkeypatch):
    folder = write_batches(tmp_path, monkeypatch)
    raw = bytearray((folder / "data_batch_3.bin").read_bytes())
    raw[5000] ^= 1
    (folder / "data_batch_3.bin").write_bytes(raw)
    with pytest.raises(ValueError, match="data_batch_3.bin is damaged: its md5"):
        cifar10(tmp_path, 4, download=False)
    assert not (tmp_path / "cifar10.npz").exists()


@pytest.mark.parametrize("damage", ["cut", "flip", "text", "npy", "pickle", "keys", "float", "labels", "shape"])
def test_cifar10_damaged_npz_is_named(cifar, damage):
    path = cifar / "cifar10.npz"
    raw, (x, y) = bytearray(path.read_bytes()), toy_cifar(100)
    good = dict(x_train=x, y_train=y, x_test=x, y_test=y)
    if damage == "cut":
        path.write_bytes(raw[:len(raw) // 2])
    elif damage == "flip":
        raw[len(raw) // 3] ^= 1
        path.write_bytes(raw)
    elif damage == "text":
        path.write_text("<html>404</html>")
    elif damage == "npy":
        with open(path, "wb") as file:
            np.save(file, x)
    else:
        np.savez(path, **{
            "pickle": good | dict(y_train=np.array([os.getcwd], object)), "keys": dict(x_train=x), "float": good | dict(x_train=x / 255),
            "labels": good | dict(y_test=y + 1), "shape": good | dict(y_train=y[:-1])}[damage])
    with pytest.raises(ValueError, match="cifar10.npz"):
        cifar10(cifar, 2, size=10, test_size=10, download=False)


# --- CIFAR-10-C, official and our own ---


@pytest.fixture
def cifarc(tmp_path):
    """Blue says the severity of an image, red its number, green the row of the pixel."""
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    np.save(folder / "labels.npy", np.tile(np.arange(100) % 10, 5).astype(np.uint8))
    x = np.empty((500, 32, 32, 3), np.uint8)
    x[:] = np.repeat(np.arange(1, 6), 100)[:, None, None, None]
    x[..., 0] = np.tile(np.arange(100), 5)[:, None, None]
    x[..., 1] = np.arange(32)[:, None]
    for kind in ("fog", "snow"):
        np.save(folder / f"{kind}.npy", x)
    return tmp_path


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_cifar10c_takes_the_rows_of_its_severity(cifarc, severity):
    clients = cifar10c(cifarc, 4, 0.5, severity=severity, corruptions=("fog", "snow"), download=False)
    assert [c.id for c in clients] == [f"{kind}-{i}" for kind in ("fog", "snow") for i in range(4)]
    assert {tuple(sizes(c)) for c in clients} == {(16, 4, 5)}
    for c in clients:
        for part in PARTS:
            data = getattr(c, part)
            assert torch.allclose(data.x[:, 2], torch.tensor((severity / 255 - CIFAR_MEAN[2]) / CIFAR_STD[2]), atol=1e-6)
            red = (data.x[:, 0, 5, 5] * CIFAR_STD[0] + CIFAR_MEAN[0]).mul(255).round().long()
            assert torch.equal(red % 10, data.y)
            assert (data.x[:, 1].diff(dim=1) > 0).all() and (data.x[:, 1].diff(dim=2) == 0).all()  # rows are still rows
    fog = torch.cat([getattr(c, part).x[:, 0, 0, 0] for c in clients[:4] for part in PARTS])
    assert len(fog.unique()) == 100  # every image once


def test_cifar10c_clients_do_not_depend_on_other_corruptions(cifarc):
    both = cifar10c(cifarc, 4, 0.5, corruptions=("fog", "snow"), download=False)
    assert same(both[4:], cifar10c(cifarc, 4, 0.5, corruptions=("snow",), download=False))
    assert not torch.equal(label_counts(both[:4]), label_counts(both[4:]))


def test_cifar10c_size(cifarc):
    assert {sum(sizes(c)) for c in cifar10c(cifarc, 4, size=10, corruptions=["fog"], download=False)} == {10}
    with pytest.raises(ValueError, match=r"number of fog images \(clients_each \* size\) must be .*, got 104"):
        cifar10c(cifarc, 4, size=26, corruptions=["fog"], download=False)


def test_cifar10c_faults(cifarc, tmp_path):
    with pytest.raises(FileNotFoundError, match="frost.npy does not exist; .* must hold the files of https://zenodo.org"):
        cifar10c(cifarc, download=False, corruptions=["frost"])
    with pytest.raises(ValueError, match="severity must be one of 1, 2, 3, 4, 5, got 0"):
        cifar10c(cifarc, severity=0, download=False)
    with pytest.raises(FileNotFoundError, match="CIFAR-10-C does not exist; pass download=True"):
        cifar10c(tmp_path / "other", download=False)
    fog = cifarc / "CIFAR-10-C" / "fog.npy"
    fog.write_bytes(fog.read_bytes()[:-100_000])
    with pytest.raises(ValueError, match="fog.npy is damaged"):
        cifar10c(cifarc, corruptions=["fog"], download=False)
    np.save(fog, np.zeros((500, 3, 32, 32), np.uint8))
    with pytest.raises(ValueError, match="fog.npy has shape .500, 3, 32, 32."):
        cifar10c(cifarc, corruptions=["fog"], download=False)
    np.save(fog, np.array([os.getcwd], object), allow_pickle=True)
    with pytest.raises(ValueError, match="fog.npy is damaged"):
        cifar10c(cifarc, corruptions=["fog"], download=False)


def test_own_corruptions_are_named_so(cifar):
    clients = cifar10c(cifar, 2, 1.0, size=20, own=True, download=False)
    assert [c.domain for c in clients[::2]] == [f"own-{kind}" for kind in CORRUPTIONS] and clients[0].id == "own-brightness-0"
    assert same(clients, cifar10c(cifar, 2, 1.0, size=20, own=True, download=False))


# --- Office-Caltech-10 and DomainNet ---


@pytest.fixture
def offices(tmp_path):
    """20 images a domain, 30 for amazon; of each class one is greyscale, and some are no JPEGs."""
    for domain in ("amazon", "caltech10", "dslr", "webcam"):
        for label, word in enumerate(list(OFFICE_CLASSES)[:10]):
            folder = tmp_path / "office_caltech_10" / domain / word
            image(folder / "a.jpg", (label * 20,) * 3, "L")
            image(folder / "b.PNG", (label * 20,) * 3, "RGBA" if label % 2 else "P", 30)
            if domain == "amazon":
                image(folder / "c.bmp", (label * 20,) * 3)
            (folder / "Thumbs.db").write_text("no image")
            (folder / "._a.jpg").write_text("no image either")
    return tmp_path


def grey(x):
    return (x[:, 0].mean((1, 2)) * 0.229 + 0.485).mul(255 / 20).round().long()


def test_office_four_clients_of_the_smallest_size(offices):
    clients = office(offices, pixels=8)
    assert [(c.id, c.domain) for c in clients] == [(d, d) for d in ("amazon", "caltech", "dslr", "webcam")]
    assert {tuple(sizes(c)) for c in clients} == {(13, 3, 4)}
    for c in clients:
        for part in PARTS:
            data = getattr(c, part)
            assert data.x.shape[1:] == (3, 8, 8) and torch.equal(grey(data.x), data.y)
    assert same(clients, office(offices, pixels=8)) and not same(clients, office(offices, seed=1, pixels=8))


def test_cache_is_used_and_notices_changes(offices, monkeypatch):
    decode, calls = datasets.decode, []
    monkeypatch.setattr(datasets, "decode", lambda paths, *rest: calls.append(len(paths)) or decode(paths, *rest))
    first = office(offices, pixels=8)
    assert calls == [20] * 4 and same(first, office(offices, pixels=8)) and calls == [20] * 4
    office(offices, pixels=9)
    assert len(calls) == 8
    image(offices / "office_caltech_10" / "dslr" / "mug" / "a.jpg", (255, 255, 255), side=40)  # another picture under an old name
    changed = office(offices, pixels=8)
    assert len(calls) == 9 and not same(first[2:3], changed[2:3]) and same(first[3:], changed[3:])
    image(offices / "office_caltech_10" / "webcam" / "mug" / "new.jpg")
    office(offices, pixels=8)
    assert len(calls) == 10
    cache = next((offices / "cache").glob("*dslr-8px*"))
    cache.write_bytes(cache.read_bytes()[:100])  # damaged: made anew
    assert same(changed[2:3], office(offices, pixels=8)[2:3]) and len(calls) == 11
    assert not list((offices / "cache").glob("*.part"))


def test_office_says_what_to_put_where(tmp_path, offices):
    with pytest.raises(FileNotFoundError, match="put images into .*office_caltech_10/amazon/<class>/ for each of the classes backpack, .*amazon_train.pkl"):
        office(tmp_path / "nowhere")
    for path in (offices / "office_caltech_10" / "webcam" / "mug").iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match="webcam/<class>/"):
        office(offices)


def test_broken_image_is_named(offices):
    (offices / "office_caltech_10" / "dslr" / "bike" / "a.jpg").write_bytes(b"\xff\xd8\xff\xe0 and then nothing")
    with pytest.raises(ValueError, match="dslr/bike/a.jpg cannot be read as an image"):
        office(offices, pixels=8)
    with pytest.raises(ValueError, match="pixels must be >= 1, got 0"):
        office(offices, pixels=0)


@pytest.fixture
def fedbn(tmp_path):
    """DomainNet with FedBN's lists, in each way that Python and numpy may have pickled them."""
    for i, domain in enumerate(DOMAINNET_DOMAINS):
        names = [(f"DomainNet/{domain}/{word}/{k}.png", word) for word in DOMAINNET_CLASSES for k in range(3)]
        for name, word in names:
            image(tmp_path / name, (DOMAINNET_CLASSES[word] * 20,) * 3)
        image(tmp_path / "DomainNet" / domain / "bird" / "unlisted.png")
        for part, listed in (("train", names[::3] + names[1::3]), ("test", names[2::3])):
            pair = tuple(zip(*listed, strict=True))
            pair = [pair, list(map(list, pair)), tuple(map(np.array, pair)), np.array(pair, object),
                    tuple(np.array(p, object) for p in pair), [[np.str_(w) for w in p] for p in pair]][i]
            (tmp_path / "DomainNet" / f"{domain}_{part}.pkl").write_bytes(pickle.dumps(pair, protocol=i))
    return tmp_path


def test_domainnet_from_lists(fedbn):
    clients = domainnet(fedbn, 3, 0.5, pixels=8)
    assert [c.id for c in clients] == [f"{d}-{i}" for d in DOMAINNET_DOMAINS for i in range(3)]
    assert {sum(sizes(c)) for c in clients} == {10}  # 30 of the lists, training and test; not the unlisted one
    assert all(torch.equal(grey(c.train.x), c.train.y) for c in clients)
    assert label_counts(clients[:3]).sum(0).tolist() == [3] * 10
    assert {sum(sizes(c)) for c in domainnet(fedbn, 3, 0.5, pixels=8, size=4)} == {4}
    with pytest.raises(ValueError, match=r"clients_each \* size must be from 1 to 30, the images of the smallest domain, got 33"):
        domainnet(fedbn, 3, pixels=8, size=11)


def test_domainnet_from_folders_takes_ten_classes(fedbn):
    for path in (fedbn / "DomainNet").glob("*.pkl"):
        path.unlink()
    for domain in DOMAINNET_DOMAINS:
        image(fedbn / "DomainNet" / domain / "sword" / "0.png")
    assert label_counts(domainnet(fedbn, 1, pixels=8), 10).sum(1).tolist() == [31] * 6


class Evil:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("where", ["list", "element", "object array", "object scalar"])
def test_malicious_pickle_is_refused_and_not_run(fedbn, where):
    mark = fedbn / "owned"
    evil = Evil(os.mkdir, (str(mark),))
    inner = pickle.dumps(evil)
    scalar = np.float64(0).__reduce__()[0]
    thing = {"list": evil, "element": (["a"], [evil]), "object array": (np.array(["a"], object), np.array([evil], object)),
             "object scalar": (["a"], [Evil(scalar, (np.dtype("O"), inner))])}[where]
    (fedbn / "DomainNet" / "real_train.pkl").write_bytes(pickle.dumps(thing))
    words = "values do not fit its shape" if where == "object scalar" else f"it wants to call '{os.mkdir.__module__}.mkdir'"
    with pytest.raises(ValueError, match=f"real_train.pkl is not a list of files and labels: .*{words}"):
        domainnet(fedbn, 2, pixels=8)
    assert not mark.exists()


@pytest.mark.parametrize("name, label, words", [
    ("../secret.png", "bird", "real_train.pkl: file must be a path inside .*DomainNet, got '../secret.png'"),
    ("/etc/passwd", "bird", "real_train.pkl: file must be a path inside .*DomainNet, got '/etc/passwd'"),
    ("DomainNet/../../x.png", "bird", "real_train.pkl: file must be a path inside .*DomainNet, got 'DomainNet/../../x.png'"),
    ("DomainNet/real/bird/0.png", "horse", "label of 'DomainNet/real/bird/0.png' must be one of bird, .*, got 'horse'"),
    ("DomainNet/real/bird/gone.png", "bird", "gone.png does not exist, but"),
])
def test_lists_with_odd_entries(fedbn, name, label, words):
    (fedbn / "DomainNet" / "real_train.pkl").write_bytes(pickle.dumps(([name], [label])))
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        domainnet(fedbn, 2, pixels=8)


# --- Speech Commands ---


@pytest.fixture
def sounds(tmp_path):
    """Training speakers ann (12 clips), bob (8), dan (8), eve (4); of the lists tom (9), una (10), vic (6), zoe (2)."""
    folder = tmp_path / "SpeechCommands" / "speech_commands_v0.02"
    for i, (speaker, n) in enumerate(dict(ann=12, bob=8, dan=8, eve=4, tom=9, una=10, vic=6, zoe=2).items()):
        for k in range(n):
            wav(folder / ("yes", "go", "cat", "zero")[k % 4] / f"{speaker}_nohash_{k // 4}.wav", (1.0, 0.6, 1.3)[k % 3], 200 + 100 * i)
    wav(folder / "_background_noise_" / "tap.wav", 3.0, 50)
    wav(folder / "_background_noise_" / "short.wav", 0.5, 60)
    for name, speakers in dict(validation=("tom", "zoe"), testing=("una", "vic")).items():
        lines = [f"{p.parent.name}/{p.name}" for s in speakers for p in folder.glob(f"*/{s}_*.wav")]
        (folder / f"{name}_list.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_speech_pools(sounds):
    seen, unseen = speech(sounds, 3, 2, download=False)
    assert [c.id for c in seen] == ["ann", "bob", "dan"]
    assert len(unseen) == 2 and {c.id for c in unseen} < {"tom", "una", "vic"}
    assert label_counts(seen[:1], 12)[0].tolist() == [3, 0, 0, 0, 0, 0, 0, 0, 0, 3, 6, 1] and len(SPEECH_CLASSES) == 12
    assert seen[0].train.x.shape[1:] == (1, 40, 101) and all(c.train.x.isfinite().all() for c in seen + unseen)
    drawn = {tuple(c.id for c in speech(sounds, 0, 2, seed=seed, download=False)[1]) for seed in range(8)}
    assert len(drawn) > 1


def test_speech_same_seed_same_clients_and_cache(sounds, monkeypatch):
    first = speech(sounds, 2, 3, download=False)
    read, paths = datasets.read_wav, []
    monkeypatch.setattr(datasets, "read_wav", lambda path, rate: paths.append(path.name) or read(path, rate))
    again = speech(sounds, 2, 3, download=False)
    assert sorted(paths) == ["short.wav", "tap.wav"]  # the clips came from the cache
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    wav(sounds / "SpeechCommands" / "speech_commands_v0.02" / "yes" / "ann_nohash_0.wav", 0.9, 900)
    changed = speech(sounds, 2, 3, download=False)
    assert not same(first[0][:1], changed[0][:1]) and same(first[0][1:], changed[0][1:])
    assert speech(sounds, 1, 0, download=False, mels=20)[0][0].train.x.shape[1:] == (1, 20, 101)


def test_speech_does_not_depend_on_how_many_are_asked_for(sounds):
    assert same(speech(sounds, 1, 0, download=False)[0], speech(sounds, 3, 1, download=False)[0][:1])


@pytest.mark.parametrize("options, words", [
    (dict(n_seen=4, n_unseen=1), "n_seen must be from 0 to 3, the speakers of the training list with at least 5 clips in .*, got 4"),
    (dict(n_seen=1, n_unseen=4), "n_unseen must be from 0 to 3, the speakers of the validation and test lists .*, got 4"),
    (dict(n_seen=-1), "n_seen must be from 0 to 3, .*, got -1"),
])
def test_speech_too_few_speakers(sounds, options, words):
    with pytest.raises(ValueError, match=words):
        speech(sounds, download=False, **options)


@pytest.mark.parametrize("options, words", [
    (dict(rate=8000), r"\(1, 16, 8000\)"), (dict(channels=2), r"\(2, 16, 16000\)"), (dict(width=1), r"\(1, 8, 16000\)"),
])
def test_wrong_wav_is_named(sounds, options, words):
    wav(sounds / "SpeechCommands" / "speech_commands_v0.02" / "go" / "ann_nohash_1.wav", **options)
    with pytest.raises(ValueError, match=f"go/ann_nohash_1.wav: channels, bits and rate must be .*, got {words}"):
        speech(sounds, 1, 0, download=False)


def test_damaged_wav_is_named(sounds):
    path = sounds / "SpeechCommands" / "speech_commands_v0.02" / "go" / "ann_nohash_1.wav"
    for raw in (b"", b"RIFF", b"not a wav file at all"):
        path.write_bytes(raw)
        with pytest.raises(ValueError, match="ann_nohash_1.wav is damaged or not a wav file"):
            speech(sounds, 1, 0, download=False)


def test_speech_missing_files(sounds, tmp_path):
    folder = sounds / "SpeechCommands" / "speech_commands_v0.02"
    with pytest.raises(FileNotFoundError, match="speech_commands_v0.02 does not exist; pass download=True"):
        speech(tmp_path / "nowhere", download=False)
    for path in (folder / "_background_noise_").iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match="_background_noise_ has no recordings"):
        speech(sounds, 1, 0, download=False)
    (folder / "testing_list.txt").unlink()
    with pytest.raises(FileNotFoundError, match="testing_list.txt does not exist; .* must hold Speech Commands v0.02"):
        speech(sounds, 1, 0, download=False)


def test_speech_failed_download_is_explained(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("no route to host")
    monkeypatch.setattr("torchaudio.datasets.SPEECHCOMMANDS", fail)
    with pytest.raises(FileNotFoundError, match="could not be downloaded .no route to host.; unpack speech_commands_v0.02.tar.gz"):
        speech(tmp_path / "new")
