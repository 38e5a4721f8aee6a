"""Imports each module of the installed wheel alone, in a Python without extras: `python .ci/wheel.py PYTHON`. Modules that need Flower must name its extra."""

import subprocess
import sys
import tempfile

MODULES = """
import importlib.metadata, pathlib
files = [pathlib.PurePosixPath(str(f)) for f in importlib.metadata.files("fedl2p")]
assert pathlib.PurePosixPath("fedl2p/py.typed") in files, "py.typed is not in the wheel"
names = [".".join(f.with_suffix("").parts) for f in files if f.suffix == ".py" and f.name not in ("__init__.py", "_modidx.py")]
assert "fedl2p.studies.runs" in names and all(n.startswith("fedl2p.") for n in names), names
print(*names)
"""
WITHOUT_FLOWER = """
try:
    import {name}
except ImportError as error:
    assert 'pip install "fedl2p[flower]"' in str(error), error
else:
    raise AssertionError("{name} imports without the extra")
"""
# Importing torch takes seconds, so it is imported once; each module of ours then comes into a process that has none of them.
FORKS = """
import os, sys, traceback, torch
for name, code in {codes!r}.items():
    child = os.fork()
    if not child:
        try:
            exec(code)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(name + " does not import alone")
    print("imports alone:", name)
"""
FLOWER = ("fedl2p.flower", "fedl2p.node", "fedl2p.simulated", "fedl2p.studies.simulation")
HEAVY = ("torchvision", "torchaudio", "matplotlib")


def run(python: str, code: str) -> str:
    # Not in the clone: there `import fedl2p` would find the sources instead of the wheel.
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run([python, "-c", code], cwd=elsewhere, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{code}\n{done.stderr}")
    return done.stdout


def main(python: str) -> None:
    names = run(python, MODULES).split()
    codes = {name: WITHOUT_FLOWER.format(name=name) if name in FLOWER else f"import {name}" for name in names}
    print(run(python, FORKS.format(codes=codes)), end="")
    run(python, f"import sys, fedl2p; heavy = [m for m in {(*HEAVY, 'torch')!r} if m in sys.modules]; assert not heavy, heavy")
    run(python, "import torch, torchvision, torchaudio")
    print(f"{len(names)} passed, 0 failed")


if __name__ == "__main__":
    main(sys.argv[1])
