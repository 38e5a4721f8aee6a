"""Clients from datasets, arrays and folders; lazy clients give the numbers of those in memory."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, TensorDataset

from fedl2p import Client, Config, Data, FedL2P, make_client
from fedl2p.folders import class_names, clients_from_folder, data_from_files, images_in
from fedl2p.loaders import LazyData, ToTensor, as_data, client_from, deal_clients
from fedl2p.runner import Runner

X, Y = torch.rand(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


class Squares(Dataset):
    """A dataset as people write them: samples as arrays, labels as ints, a transform of its own that draws."""

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i].numpy() ** 2 + torch.rand(3).numpy(), int(Y[i])


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for d, who in enumerate(("photo", "sketch")):
        for c, name in enumerate(("cat", "dog", "owl")):
            (tmp_path / who / name).mkdir(parents=True)
            for i in range(20):
                pixels = rng.integers(0, 120, (9, 8, 3)) + 60 * c + 10 * d
                Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / who / name / f"{i}.png")
    return tmp_path


@pytest.mark.parametrize("source", [TensorDataset(X, Y), (X, Y), [X.numpy(), Y.tolist()], {"x": X, "targets": Y}, Data(X, Y), ConcatDataset([TensorDataset(X[:5], Y[:5]), TensorDataset(X[5:], Y[5:])])], ids=["dataset", "pair", "arrays", "dict", "data", "concatenated"])
@pytest.mark.parametrize("lazy", [False, True])
def test_all_sources_give_the_same_samples(source, lazy):
    data = as_data(source, lazy=lazy)
    assert torch.equal(data.x, X) and torch.equal(data.y, Y)
    doubled = as_data(source, transform=lambda x: 2 * torch.as_tensor(x), lazy=lazy)
    assert torch.equal(doubled.x, 2 * X)


def test_random_transforms_are_repeatable_and_leave_the_random_state_alone():
    lazy, state = as_data(Squares(), lazy=True), torch.get_rng_state()
    assert torch.equal(lazy.x, lazy.x) and torch.equal(lazy.x, as_data(Squares()).x)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(lazy[torch.tensor([4, 2])].x, lazy.x[[4, 2]])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (DataLoader(TensorDataset(X, Y)), "pass the dataset of a DataLoader"),
        (Stream(), "read a stream first"),
        (TensorDataset(X, Y.float() + 0.5).tensors, "labels must be whole numbers"),
        ({"x": X, "why": Y}, "columns with labels must be y or label"),
        ((X, Y[:3]), "number of labels must be 12"),
        ((X.to(torch.uint8), Y), "lambda x: x.float\\(\\) / 255"),
        ((X[:0], Y[:0]), "number of samples must be >= 1"),
        (([torch.rand(2), torch.rand(3)], [0, 1]), "samples must have the same shape"),
        (["x", "y", "z"], "pairs of sample and label"),
        ((X, ["cat"] * 12), "labels must be whole numbers"),
    ],
)
def test_what_does_not_fit_is_said(source, words):
    with pytest.raises(ValueError, match=words):
        as_data(source)


@pytest.mark.parametrize("wrong", [TensorDataset(X, Y), (X, Y), None])
def test_make_client_takes_data_only(wrong):
    with pytest.raises(ValueError, match="data must be Data, got .*client_from takes datasets"):
        make_client("a", wrong)


def test_shares_of_test_and_validation():
    client = make_client("a", Data(X, Y), share=0.5, val_share=1 / 3)
    assert [len(client.train), len(client.val), len(client.test)] == [4, 2, 6]
    client = client_from("a", (X, Y), test_share=0.5, val_share=1 / 3)
    assert [len(client.train), len(client.val), len(client.test)] == [4, 2, 6]
    with pytest.raises(ValueError, match="val_share must be in"):
        client_from("a", (X, Y), val_share=1.0)


def test_domains_have_other_tastes_with_one_seed():
    data = torch.rand(600, 1), torch.arange(600) % 6
    tastes = [[torch.bincount(torch.cat([c.train.y, c.val.y, c.test.y]), minlength=6) for c in deal_clients(data, 3, 0.1, domain)] for domain in ("a", "b")]
    assert not torch.equal(torch.stack(tastes[0]), torch.stack(tastes[1]))


def test_folder(folder):
    lazy, whole = (clients_from_folder(folder, ToTensor(6), clients_each=2, alpha=0.5, lazy=lazy) for lazy in (True, False))
    assert [c.id for c in lazy] == ["photo-0", "photo-1", "sketch-0", "sketch-1"] and lazy[0].domain == "photo"
    for a, b in zip(lazy, whole, strict=True):
        assert isinstance(a.train, LazyData) and not isinstance(b.train, LazyData)
        for part in ("train", "val", "test"):
            assert torch.equal(getattr(a.to("cpu"), part).x, getattr(b, part).x)
            assert torch.equal(getattr(a, part).y, getattr(b, part).y)
    assert len(pickle.dumps(lazy[0])) < len(pickle.dumps(whole[0]))
    assert class_names(folder) == ["cat", "dog", "owl"]
    normal = clients_from_folder(folder, ToTensor(6, mean=(0.5,), std=(0.1, 0.2, 0.4)), lazy=False)[0]
    plain = clients_from_folder(folder, ToTensor(6), lazy=False)[0]
    assert torch.allclose(normal.train.x, (plain.train.x - 0.5) / torch.tensor([0.1, 0.2, 0.4]).view(3, 1, 1))


def test_folder_faults(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        clients_from_folder(folder / "gone")
    with pytest.raises(ValueError, match="must be one of the classes cat, got 'dog'"):
        clients_from_folder(folder, classes=["cat"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="<client or domain>/<class>/<image>"):
        clients_from_folder(tmp_path / "empty")
    eps = folder / "photo" / "cat" / "x.png"
    eps.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")  # would start another program, if it were opened by its content
    with pytest.raises(ValueError, match=r"x.png cannot be read as an image \(cannot identify"):  # and not because Ghostscript is missing
        data_from_files([eps], ["cat"], lazy=False)


def test_a_policy_from_lazy_clients_is_that_of_clients_in_memory(folder):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)).eval()
    learned = []
    for lazy in (True, False):
        clients = clients_from_folder(folder, ToTensor(6), lazy=lazy)
        clients = pickle.loads(pickle.dumps(clients))  # as they come to another process
        policy = FedL2P(model, Config(epochs=1, splits=1, choosing_rounds=1)).fit(clients, runner=Runner(0))
        learned.append((policy.metanets.state_dict(), [r.score for r in policy.score(clients, Runner(0))]))
    for state, scores in learned[1:]:
        assert all(torch.equal(t, learned[0][0][k]) for k, t in state.items()) and scores == learned[0][1]
    assert isinstance(clients[0], Client)


def test_a_class_without_images_that_can_be_read_is_said(tmp_path):
    for kind, name in (("cat", "a.png"), ("cat", "b.tif"), ("dog", "a.xyz")):
        (tmp_path / "me" / kind).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "me" / kind / name, format="TIFF" if name.endswith(".tif") else "PNG")
    with pytest.warns(RuntimeWarning, match=r"dog has files \.xyz, but no image"):
        found = images_in(tmp_path / "me")
    assert [p.name for p in found] == ["a.png", "b.tif"]
    assert data_from_files(found, ["cat", "dog"], ToTensor(8), lazy=False).x.shape == (2, 3, 8, 8)


@pytest.mark.parametrize("label", [0.9, "cat", None, torch.tensor([0, 1])])
def test_labels_of_a_dataset_are_whole_numbers(label):
    with pytest.raises(ValueError, match="labels must be whole numbers"):
        as_data([(torch.zeros(3), label)] * 4)


@pytest.mark.parametrize(("options", "message"), [
    ({"size": 0}, "size must be >= 1, got 0"),
    ({"size": 20_000}, "size must be <= 10000, got 20000"),
    ({"size": (32, 32)}, r"size must be a whole number, got \(32, 32\)"),
    ({"mean": 0.5}, "mean must be .*, got 0.5"),
    ({"mean": (0.5, 0.5)}, r"mean must be 1 or 3 numbers, in a tuple, got \(0.5, 0.5\)"),
    ({"std": (0.1, 0.0, 0.1)}, r"std must be > 0, got \(0.1, 0.0, 0.1\)"),
])
def test_a_transform_that_makes_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        ToTensor(**options)
