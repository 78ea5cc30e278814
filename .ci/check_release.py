"""The version, the citation and the changelog agree; with a tag as argument, it agrees, too."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version() -> str:
    (found,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "src/bitgraft/__init__.py").read_text(), re.MULTILINE)
    return str(found)


def problems(tag: str | None = None) -> list[str]:
    wanted, found = version(), []
    if f"version: {wanted}\n" not in (ROOT / "CITATION.cff").read_text():
        found.append(f"CITATION.cff does not say version: {wanted}")
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if sections[:1] != ["Unreleased"] or wanted not in sections:
        found.append(f"CHANGELOG.md needs the sections Unreleased, on top, and {wanted}, not {sections}")
    if tag is not None and tag != f"v{wanted}":
        found.append(f"the tag is {tag}, but the version is {wanted}: set __version__, or tag v{wanted}")
    return found


if __name__ == "__main__":
    faults = problems(*sys.argv[1:2])
    print("\n".join(faults) or f"version {version()}")
    sys.exit(bool(faults))
