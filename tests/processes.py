"""Processes that tests start, and those that they leave behind."""

from pathlib import Path

# The first line of a program that is to be interrupted: a job in the background has Ctrl-C ignored, and so have its children.
INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def alive(session: int) -> list[int]:
    "Processes of a session that still run (not zombies)."
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, sid = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(sid) == session and state != "Z":
            found.append(int(path.parent.name))
    return found
