"""Time and memory of `fedl2p demo`: `python tests/bench/demo.py [OPTIONS OF THE DEMO]` (Linux).

Memory is the sum over all of its processes of the proportional set size: pages that processes share count once.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def memory(session: int) -> int:
    "Kilobytes of all processes of a session."
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[3]) == session:
                total += sum(int(line.split()[1]) for line in (stat.parent / "smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
        except OSError:  # it has just ended
            continue
    return total


def main(options: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", "from fedl2p.cli import main; raise SystemExit(main())", "demo", "--out", f"{folder}/out", *options]
        start, peak = time.time(), 0
        process = subprocess.Popen(command, start_new_session=True)
        while process.poll() is None:
            peak = max(peak, memory(process.pid))
            time.sleep(2)
    print(f"{time.time() - start:.0f} s, at most {peak / 1024:.0f} MB, on {os.cpu_count()} cores")


if __name__ == "__main__":
    main(sys.argv[1:])
