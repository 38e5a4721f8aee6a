"""Which processes a test has left behind."""

from pathlib import Path


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
