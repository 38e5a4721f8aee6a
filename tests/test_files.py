"""What all loaders share: archives, arrays, lists, images, caches and sounds that are missing, damaged, hostile or out of date."""

import hashlib
import os
import pickle
import random
import struct
import subprocess
import sys
import tarfile
import wave

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedl2p.folders import FORMATS, read_image
from fedl2p.studies import files
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
    with pytest.raises(FileNotFoundError, match="a.txt does not exist, and file:///nowhere/a.tar could not be downloaded"):
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
    with pytest.raises(ValueError, match="b.npy is damaged or not an .npy file"):
        load_npy(tmp_path / "b.npy")
    (tmp_path / "c.npy").write_bytes(pickle.dumps(Evil(open, (str(tmp_path / "made"), "w"))))  # numpy reads these, too, if it may
    with pytest.raises(ValueError, match="c.npy is damaged or not an .npy file"):
        load_npy(tmp_path / "c.npy")
    assert not (tmp_path / "made").exists()


# --- lists and images ---


class Evil:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


NAMES, LABELS = ["shop/a.jpg", "shop/bé.jpg", "shop/日本.png"], ["bike", "mug", "mug"]
KINDS = {
    "list": list, "tuple": tuple, "words": np.array, "objects": lambda v: np.array(v, object), "numpy's words": lambda v: [np.str_(w) for w in v],
    "other byte order": lambda v: np.array(v).astype(np.array(v).dtype.newbyteorder()),
}


def reads(path, raw):
    path.write_bytes(raw)
    return read_list(path)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_lists_in_every_way_that_python_and_numpy_write_them(tmp_path, kind, protocol):
    names, labels = KINDS[kind](NAMES), KINDS[kind](LABELS)
    for pair in ((names, labels), [names, labels]):
        assert reads(tmp_path / "a.pkl", pickle.dumps(pair, protocol)) == (NAMES, LABELS)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("dtype", [object, str])
@pytest.mark.parametrize("order", ["C", "F"])
def test_tables_with_two_rows(tmp_path, dtype, order, protocol):
    table = np.array([NAMES, LABELS], dtype, order=order)
    assert reads(tmp_path / "a.pkl", pickle.dumps(table, protocol)) == (NAMES, LABELS)
    assert reads(tmp_path / "a.pkl", pickle.dumps(np.array(list(zip(NAMES, LABELS, strict=True)), dtype).T, protocol)) == (NAMES, LABELS)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("labels", [[0, 200, 70_000], [0, -1, 2**40], np.array([3, -4, 5]), np.array([0, 255, 7], "u1"), np.array([1, -2, 300], ">i2"), np.array([1, "mug", np.int32(-3)], object)], ids=range(6))
def test_labels_that_are_numbers(tmp_path, labels, protocol):
    assert reads(tmp_path / "a.pkl", pickle.dumps((NAMES, labels), protocol)) == (NAMES, list(map(str, labels)))


def test_lists_of_python_2_and_of_numpy_1(tmp_path):
    assert reads(tmp_path / "a.pkl", b"(lp0\nS'a.jpg'\np1\naS'b.jpg'\np2\na(lp3\nS'mug'\np4\nag4\natp5\n.".replace(b"(lp0", b"((lp0", 1)) == (["a.jpg", "b.jpg"], ["mug", "mug"])
    old = pickle.dumps((np.array(NAMES), np.array(LABELS)), 2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert reads(tmp_path / "a.pkl", old) == (NAMES, LABELS)


def test_a_list_may_be_long(tmp_path):
    names, labels = [f"DomainNet/real/bird/{i}.jpg" for i in range(200_000)], ["bird"] * 200_000
    assert reads(tmp_path / "a.pkl", pickle.dumps((names, labels))) == (names, labels)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("call", [(eval, ("1",)), (getattr, ("a", "b")), (np.load, ("x",)), (__import__, ("os",)), (os.system, ("true",)), (pickle.loads, (b"N.",))])
def test_foreign_names_are_refused(tmp_path, call, protocol):
    words = r"a.pkl is not a list of files and labels: (STACK_)?GLOBAL at byte \d+: it wants to call '.*\.\w+', which no list of files needs"
    for thing in (Evil(*call), ([], [Evil(*call)])):
        with pytest.raises(ValueError, match=words):
            reads(tmp_path / "a.pkl", pickle.dumps(thing, protocol))


RECONSTRUCT, BUFFER = np.array(0).__reduce__()[0], np.array([1]).__reduce_ex__(5)[0]
TYPE = np.dtype("u1")
CALLS = {  # of names that arrays have, in ways in which arrays do not have them
    "an address": (np.ndarray, ((1,), "O", b"AAAAAAAA")),
    "memory": (np.ndarray, ((10**9,), "u1")),
    "a large type": (np.dtype, ("V2000000000",)),
    "an array of addresses": (BUFFER, (bytearray(b"A" * 16), np.dtype("O"), (2,), "C")),
    "an array that is too short": (BUFFER, (bytearray(16), TYPE, (10**9,), "C")),
    "an array of 2**70": (BUFFER, (bytearray(16), TYPE, (2**70,), "C")),
    "a negative shape": (BUFFER, (bytearray(16), TYPE, (-1,), "C")),
    "a state that is too short": (RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, (10**9,), TYPE, False, b"AAAA")),
    "addresses as a state": (RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, (1,), np.dtype("O"), False, b"AAAAAAAA")),
    "a type with a state": (np.dtype, ("O8", False, True), (3, "<", None, None, None, 2**40, 2**40, 0)),
    "a type with fields": (np.dtype, ("V8", False, True), (3, "|", None, ("a",), {"a": (np.dtype("O"), 2**40)}, 8, 1, 16)),
    "letters that are none": (BUFFER, (bytearray(b"\xff" * 8), np.dtype("U2"), (1,), "C")),
    "words of 9999 letters": (BUFFER, (bytearray(4 * 9999), np.dtype("U9999"), (1,), "C")),
    "an encoding": (np.array([]).__reduce_ex__(2)[1][2].__class__, ()),
}


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("call", CALLS)
def test_no_call_is_made(tmp_path, call, protocol):
    evil = Evil(*CALLS[call])
    for thing in (evil, (evil, evil), (["a.jpg"], [evil])):
        with pytest.raises(ValueError, match="a.pkl is not a list of files and labels: "):
            reads(tmp_path / "a.pkl", pickle.dumps(thing, protocol))


def test_the_file_that_took_down_the_process(tmp_path):
    """66 bytes: `numpy.ndarray((1,), "O", b"AAAAAAAA")`, an object at an address of its choice."""
    raw = b"\x80\x03cnumpy\nndarray\nK\x01\x85X\x01\x00\x00\x00OC\x08AAAAAAAA\x87R."
    with pytest.raises(ValueError, match=r"a.pkl is not a list of files and labels: it has numpy.ndarray where a list, a tuple or an array of words should be"):
        reads(tmp_path / "a.pkl", raw)
    twice = b"\x80\x03(" + raw[2:-1] + raw[2:-1] + b"t."
    with pytest.raises(ValueError, match="it has numpy.ndarray where"):
        reads(tmp_path / "a.pkl", twice)


@pytest.mark.parametrize(("raw", "opcode"), [(b"]2.", "DUP"), (b"].", None), (b"}.", "EMPTY_DICT"), (b"G" + b"\0" * 8 + b".", "BINFLOAT"), (b"(cos\nsystem\no.", "GLOBAL"), (b"(ios\nsystem\n.", "INST"), (b"Pa\n.", "PERSID"), (b"\x82\x01.", "EXT1"), (b"\x97.", "NEXT_BUFFER"), (b"cnumpy\nndarray\n)\x81.", "NEWOBJ"), (b"h\x05.", "BINGET"), (b"R.", "REDUCE"), (b"NNR.", "REDUCE"), (b"b.", "BUILD"), (b"cnumpy\ndtype\n)b.", "BUILD"), (b"Na.", "APPEND"), (b"NNa.", "APPEND"), (b"e.", "APPENDS"), (b"\x87.", "TUPLE3"), (b"t.", "TUPLE"), (b"NN\x93.", "STACK_GLOBAL"), (b".", "STOP"), (b"cnumpy\ndtype\n)R)R.", "REDUCE")])
def test_other_instructions_are_named(tmp_path, raw, opcode):
    with pytest.raises(ValueError, match=f"a.pkl is not a list of files and labels: {opcode + ' at byte' if opcode else 'not enough values'}"):
        reads(tmp_path / "a.pkl", raw)


def bombs():
    """Small or strange files that promise, repeat or nest a lot."""
    size, long, word = 20_000_000, 2**63, b"\x8c\x05a.jpg\x94"
    laugh = b"".join(b"](" + (b"h" + bytes([i])) * 10 + b"e\x94" for i in range(100))  # each list holds ten times the one before
    data = b"\x8e" + struct.pack("<Q", 4096) + b"a\0\0\0" * 1024 + b"\x94"
    dtype = b"cnumpy\ndtype\n(X\x05\0\0\0U1024\x89\x88tR(K\x03X\x01\0\0\0<NNNJ\0\x10\0\0K\x04K\x08tb\x94"
    scalar = b"cnumpy.core.multiarray\nscalar\n\x94h\x01h\x00\x86\x94"
    return {
        "lists": b"]" * size + b".", "deep tuples": b")" + b"\x85" * 500_000 + b".", "deep lists": b"]" * 200_000 + b"a" * 199_999 + b".", "marks": b"(" * 500_000 + b".",
        "deep calls": b"cnumpy\ndtype\n\x94" + b"h\x00" * 100_000 + b")" + b"R\x85" * 100_000 + b".", "a list in itself": b"]\x94h\x00ah\x00\x86.",
        "laughs": word + laugh + b"\x86.", "a name that is one": word + laugh + b"h\x64\x93.", "far memo": b"]r\xff\xff\xff\xff.", "far put": b"]p" + b"9" * 4000 + b"\n.",
        "a long number": b"I" + b"9" * size + b"\n.", "another": b"\x8b" + struct.pack("<I", size) + b"\x7f" * size + b".",
        "promises": b"\x8d" + struct.pack("<Q", long) + b"a.", "more": b"\x96" + struct.pack("<Q", long - 1) + b"a.", "a frame": b"\x95" + struct.pack("<Q", long) + b"].",
        "a long word": b"](\x8d" + struct.pack("<Q", size) + b"a" * size + b"e](K\x01e\x86.", "no quotes": b"S" + b"a" * size + b"\n.", "a long name": b"c" + b"a" * size + b"\nb\n.",
        "a word, often": data + dtype + scalar + b"](" + b"h\x02h\x03R" * 200_000 + b"e](" + b"K\x01" * 200_000 + b"e\x86.", "large": b"]" * (64 << 20) + b".",
    }


READ = """
import resource, sys, time
from pathlib import Path
from fedl2p.studies.files import read_list
most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 1_000_000_000
resource.setrlimit(resource.RLIMIT_AS, (most, most))
for path in sorted(Path(sys.argv[1]).iterdir()):
    start = time.process_time()
    try:
        said = str(len(read_list(path)[0]))
    except ValueError as error:
        said = str(error)
    assert len(said) < 1000 and time.process_time() - start < 20, path
    print(path.stem, said.rpartition("labels: ")[2], sep=": ")
    path.unlink()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_bombs_cost_little_time_and_memory(tmp_path):
    """In a process that may take 1 GB more than it has."""
    for name, raw in bombs().items():
        (tmp_path / f"{name}.pkl").write_bytes(raw)
    done = subprocess.run([sys.executable, "-c", READ, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert said.keys() == bombs().keys()
    assert {name: text for name, text in said.items() if text.isdigit()} == {"a word, often": "200000"}
    assert "more than 2000000 instructions" in said["lists"] and "does not fit" in said["a name that is one"] and "at most 64 MB" in said["large"]


def damaged(raw, seed):
    """A file with a few bytes changed, cut out or doubled."""
    rng, raw = random.Random(seed), bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(raw))
        match rng.randrange(4):
            case 0:
                raw[at] ^= 1 << rng.randrange(8)
            case 1:
                raw[at] = rng.randrange(256)
            case 2:
                del raw[at:at + rng.randint(1, 4)]
            case 3:
                raw[at:at] = raw[at:at + rng.randint(1, 8)]
    return bytes(raw)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("kind", ["list", "words", "objects", "numpy's words"])
def test_damaged_lists_are_refused_or_read(tmp_path, kind, protocol):
    whole, read = pickle.dumps((KINDS[kind](NAMES), KINDS[kind](LABELS)), protocol), 0
    for seed in range(300):
        raw = damaged(whole, seed)
        try:
            names, labels = reads(tmp_path / "a.pkl", raw)
        except ValueError as error:
            assert "a.pkl" in str(error)
            continue
        read += 1
        assert len(names) == len(labels) and all(type(word) is str for word in names + labels)
        if kind == "list" and b"numpy" not in raw:  # so that pickle itself can do no harm
            try:
                expected = pickle.loads(raw)
            except (pickle.UnpicklingError, ValueError):  # it minds frames and versions
                continue
            assert [list(map(str, part)) for part in expected] == [names, labels]
    assert read  # where a letter is another, and nothing else has changed


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_list_is_named(tmp_path, kind):
    for protocol in range(6):
        raw = pickle.dumps((KINDS[kind](NAMES), KINDS[kind](LABELS)), protocol)
        for end in range(0, len(raw), 3):
            with pytest.raises(ValueError, match="a.pkl is not a list"):
                reads(tmp_path / "a.pkl", raw[:end])


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_noise_is_no_list(tmp_path_factory, raw):
    with pytest.raises(ValueError, match="a.pkl is not a list"):
        reads(tmp_path_factory.mktemp("noise") / "a.pkl", raw)


@pytest.mark.skipif(sys.platform == "win32", reason="no such files")
def test_lists_are_files(tmp_path):
    os.mkfifo(tmp_path / "a.pkl")
    (tmp_path / "b.pkl").symlink_to("/dev/zero")
    for name in ("a.pkl", "b.pkl", "c.pkl"):
        with pytest.raises(ValueError, match=f"{name} is not a list of files and labels: it must be a file of at most 64 MB"):
            read_list(tmp_path / name)


def test_no_pickle_is_imported():
    assert "pickle" not in vars(files)


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


@pytest.mark.parametrize("suffix", sorted(FORMATS))
def test_every_format_that_a_name_may_have_is_read(tmp_path, suffix):
    Image.new("RGB", (6, 6), (250, 0, 0)).save(tmp_path / f"a{suffix}")
    assert decode([tmp_path / f"a{suffix}"], 4, "")[0, 0].min() > 240


@pytest.mark.parametrize("format", ["EPS", "PDF", "PPM", "ICO", "TGA", "PCX"])
def test_other_formats_are_refused_whatever_their_name(tmp_path, format, monkeypatch):
    """An image is opened by its content; for an EPS that would start Ghostscript."""
    Image.new("RGB", (6, 6)).save(tmp_path / "a.x", format)
    (tmp_path / "a.x").rename(tmp_path / "x.png")
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ValueError, match=r"x.png cannot be read as an image \(cannot identify image file .*\)"):
        decode([tmp_path / "x.png"], 4, "")


def test_an_image_that_would_fill_the_memory_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    Image.new("1", (200, 200)).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 39_999)
    monkeypatch.setattr(Image.Image, "convert", None)
    with pytest.raises(ValueError, match=r"a.png cannot be read as an image \(Image size \(40000 pixels\) exceeds limit"):
        decode([tmp_path / "a.png"], 8, "")


@pytest.mark.parametrize("read", [load_npy, read_npz, lambda p: read_wav(p, 16000), read_image, lambda p: read_checked(p, "0"), read_list])
def test_a_pipe_is_refused_and_not_waited_for(read, tmp_path):
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(ValueError, match="a.png .*(is no regular file|must be a file)|a.png cannot be read as an image .it is no regular file"):
        read(tmp_path / "a.png")


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
    with pytest.raises(ValueError, match="a.wav is damaged or not a wav file"):
        read_wav(path, 8000)
