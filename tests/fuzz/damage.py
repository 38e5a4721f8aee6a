"""Damage: other JSON values, missing keys, flipped and lost bytes. All of it follows from a random.Random."""

import copy

ODD = [None, True, False, 0, -1, 1, 10**30, 10**400, -(10**30), 0.5, 1e308, -1e-320, float("nan"), float("inf"), "", "x", "nan", "<script>", "../../x", "\x00", "a" * 2000, [], {}, [[]], [None], {"a": {}}, [1, "b"], {"": None}]


def places(value, path=()):
    """Paths to all values inside of a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def damaged_json(value, rng, times=1):
    """The same value, with some of its parts replaced, dropped or doubled."""
    value = copy.deepcopy(value)
    for _ in range(times):
        *path, last = rng.choice([p for p in places(value) if p] or [(0,)]) if isinstance(value, (dict, list)) and value else (None,)
        if last is None:
            return rng.choice(ODD)
        inner = value
        for key in path:
            inner = inner[key]
        what = rng.random()
        if what < 0.2:
            del inner[last]
        elif what < 0.25 and isinstance(inner, list):
            inner.append(inner[last])
        else:
            inner[last] = copy.deepcopy(rng.choice(ODD))
    return value


def damaged_bytes(raw, rng):
    """The same bytes, with some flipped, lost, doubled or added; now and then as they were, so that it is seen that these are read."""
    if rng.random() < 0.1:
        return raw
    what, at = rng.randrange(6), rng.randrange(len(raw) + 1)
    if what == 0:
        return raw[:at]
    if what == 1:
        return raw[at:]
    if what == 2:
        return raw[:at] + rng.randbytes(rng.randrange(1, 40)) + raw[at:]
    if what == 3:
        return raw[:at] + raw[min(len(raw), at + rng.randrange(1, 200)):]
    if what == 4:
        return rng.randbytes(rng.randrange(200))
    whole = bytearray(raw)
    for _ in range(rng.choice([1, 1, 1, 4, 30])):
        whole[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
    return bytes(whole)
