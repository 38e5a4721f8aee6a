"""Lists the licences of the package's run-time dependencies, and of theirs: `python .ci/licences.py`."""

import re
from importlib.metadata import PackageNotFoundError, distribution


def licence(found) -> str:
    """What a distribution says of its licence, in a few words."""
    data = found.metadata
    named = [c.split(" :: ")[-1] for c in data.get_all("Classifier") or [] if c.startswith("License ::")]
    text = data.get("License-Expression") or ", ".join(named) or (data.get("License") or "").strip().splitlines()[:1]
    return text if isinstance(text, str) else (text[0] if text else "not said")


def needed(root: str) -> dict[str, str]:
    """Name and version -> licence, of all that a package needs without extras."""
    todo, done = [root], {}
    while todo:
        name = todo.pop()
        try:
            found = distribution(name)
        except PackageNotFoundError:  # of another platform
            continue
        key = f"{found.metadata['Name']} {found.version}"
        if key not in done:
            done[key] = licence(found)
            todo += [re.split(r"[ ;<>=!~\[(]", r)[0] for r in found.requires or [] if "extra ==" not in r]
    return dict(sorted(done.items(), key=lambda item: item[0].lower()))


if __name__ == "__main__":
    for name, text in needed("fedl2p").items():
        print(f"| {name} | {text} |")
