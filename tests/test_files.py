"""What all loaders share: archives, arrays, lists, images, caches and sounds that are missing, damaged, hostile or out of date."""

import hashlib
import os
import pickle
import tarfile
import wave

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedl2p.studies.files import (
    cached,
    decode,
    fetch,
    find_images,
    key,
    load_npy,
    read_checked,
    read_list,
    read_npz,
    read_wav,
    write_npz,
)

# --- archives and arrays ---


def archive(folder):
    folder.mkdir()
    (folder / "a.txt").write_text("inside")
    with tarfile.open(folder / "a.tar", "w") as file:
        file.add(folder / "a.txt", "a.txt")
    (folder / "a.txt").unlink()
    return hashlib.md5((folder / "a.tar").read_bytes()).hexdigest()


def test_fetch_unpacks_the_archive_that_it_knows_and_no_other(tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    fetch("file:///nowhere/a.tar", archive(good), good, good / "a.txt", True)
    assert os.listdir(good) == ["a.txt"]
    archive(bad)
    with pytest.raises(FileNotFoundError, match="a.txt is not there, and file:///nowhere/a.tar could not be downloaded"):
        fetch("file:///nowhere/a.tar", "0" * 32, bad, bad / "a.txt", True)
    assert os.listdir(bad) == ["a.tar"]


def test_read_checked(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"abc")
    assert read_checked(tmp_path / "a.bin", "900150983cd24fb0") == b"abc"
    with pytest.raises(ValueError, match="a.bin is damaged: its md5 is 900150983cd24fb0d6963f7d28e17f72, the official one begins with 1234"):
        read_checked(tmp_path / "a.bin", "1234")


@given(cut=st.integers(0, 2000), flip=st.integers(0, 2000))
@settings(max_examples=60, deadline=None)
def test_damaged_npz_is_named_or_harmless(tmp_path_factory, cut, flip):
    path, x = tmp_path_factory.mktemp("npz") / "a.npz", np.arange(200)
    write_npz(path, x=x)
    raw = bytearray(path.read_bytes())
    raw[flip % len(raw)] ^= 1
    for damaged in (raw, raw[:cut % len(raw)]):
        path.write_bytes(damaged)
        try:
            arrays = read_npz(path)
        except ValueError as error:
            assert "a.npz is damaged" in str(error)
        else:  # a flipped bit that means nothing, such as a date
            assert all(np.array_equal(v, x) for v in arrays.values())


def test_write_npz_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "new" / "a.npz"
    write_npz(path, x=np.arange(3))

    def full(file, **_):
        file.write(b"half")
        raise OSError("no space left on device")
    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="no space left"):
        write_npz(path, x=np.arange(9))
    assert os.listdir(path.parent) == ["a.npz"] and read_npz(path)["x"].tolist() == [0, 1, 2]


def test_load_npy_stays_on_disk_and_refuses_pickles(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(6))
    assert isinstance(load_npy(tmp_path / "a.npy"), np.memmap)
    np.save(tmp_path / "b.npy", np.array([os.getcwd], object), allow_pickle=True)
    with pytest.raises(ValueError, match="b.npy is damaged or no .npy file"):
        load_npy(tmp_path / "b.npy")


# --- lists and images ---


class Evil:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("call", [(eval, ("1",)), (getattr, (np, "load")), (np.load, ("x",)), (__import__, ("os",))])
def test_only_arrays_are_rebuilt(tmp_path, call):
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(([], [Evil(*call)])) if call[0] is not getattr else pickle.dumps(([], [Evil(getattr, ("a", "b"))])))
    with pytest.raises(ValueError, match="wants to call"):
        read_list(tmp_path / "a.pkl")


@pytest.mark.parametrize("raw", [b"", b"no pickle", pickle.dumps(7), pickle.dumps((["a"], ["b", "c"])), pickle.dumps((["a"] * 5, ["b"] * 5))[:-4]])
def test_damaged_lists_are_named(tmp_path, raw):
    (tmp_path / "a.pkl").write_bytes(raw)
    with pytest.raises(ValueError, match="a.pkl"):
        read_list(tmp_path / "a.pkl")


def test_find_images_takes_any_name_of_a_class_but_every_class(tmp_path):
    classes = {"mug": 0, "back_pack": 1, "backpack": 1}
    for name in ("mug/b.JPG", "mug/a.png", "mug/.a.png", "mug/Thumbs.db", "backpack/a.gif"):
        path = tmp_path / "dslr2" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert [(path.name, label) for path, label in find_images(tmp_path, ("dslr", "dslr2"), classes)] == [("a.png", 0), ("b.JPG", 0), ("a.gif", 1)]
    with pytest.raises(FileNotFoundError, match="dslr/<class>/ for each of the classes mug, back_pack, backpack, pen .*dslr_train.pkl"):
        find_images(tmp_path, ("dslr", "dslr2"), classes | {"pen": 2})


def test_decoded_images_stand_upright(tmp_path):
    half = Image.new("RGB", (10, 20), (255, 0, 0))
    half.paste((0, 0, 255), (0, 10, 10, 20))  # red above blue
    half.save(tmp_path / "half.png")
    x = decode([tmp_path / "half.png"], 8, "")
    assert x.shape == (1, 3, 8, 8) and (x[0, 0, :3] == 255).all() and (x[0, 2, 5:] == 255).all() and (x[0, 1] == 0).all()


# --- caches and sounds ---


def test_key_knows_names_sizes_times_and_settings(tmp_path):
    paths = [tmp_path / "x" / "y" / name for name in ("a", "b")]
    paths[0].parent.mkdir(parents=True)
    for path in paths:
        path.write_text("same")
        os.utime(path, ns=(0, 10**9))
    seen = [key(paths), key(paths, 4), key(paths, 5), key(paths[:1]), key(paths[::-1])]
    os.utime(paths[0], ns=(0, 10**9 + 1))
    seen.append(key(paths))
    os.utime(paths[0], ns=(0, 10**9))
    assert key(paths) == seen[0]
    paths[0].write_text("longer")
    os.utime(paths[0], ns=(0, 10**9))
    seen.append(key(paths))
    assert len(set(seen)) == len(seen)


def test_cached_makes_anew_what_is_damaged_or_has_another_key(tmp_path):
    path, made = tmp_path / "cache" / "a.npz", []

    def ask(text):
        return cached(path, text, lambda: made.append(text) or np.array([len(made)])).tolist()
    assert [ask("one"), ask("one"), ask("two"), ask("two")] == [[1], [1], [2], [2]]
    path.write_bytes(path.read_bytes()[:50])
    assert ask("two") == [3]
    write_npz(path, x=np.arange(3))  # no key at all
    assert ask("two") == [4] and ask("two") == [4] and made == ["one", "two", "two", "two"]


def test_read_wav(tmp_path):
    path = tmp_path / "a.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(np.array([-32768, 0, 16384], "<i2").tobytes())
    x = read_wav(path, 8000)
    assert x.tolist() == [-1.0, 0.0, 0.5] and x.dtype == np.float32
    words = r"a.wav: channels, bits and rate must be \(1, 16, 16000\) as in the official files, got \(1, 16, 8000\)"
    with pytest.raises(ValueError, match=words):
        read_wav(path, 16_000)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ValueError, match="a.wav is damaged or no wav file"):
        read_wav(path, 8000)
