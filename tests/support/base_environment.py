"""An environment with what `pip install agentrl` alone installs: links to what this one has, so that nothing is installed."""

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement


def make_base_environment(folder: Path) -> Path:
    """Return the interpreter of a new environment: with agentrl and what it requires without extras, and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=300)
    python = folder / "bin" / "python"
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    told = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True, timeout=300).stdout
    installed = Path(told.strip())
    for found in map(distribution, {name for name, _ in _required("agentrl", frozenset(), {})}):
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:  # `..` leads to scripts
            if not (installed / top).exists():
                (installed / top).symlink_to(str(found.locate_file(top)))
    return python


_Seen = dict[tuple[str, frozenset[str]], None]


def _required(name: str, extras: frozenset[str], seen: _Seen) -> _Seen:
    """Return a distribution with its extras, and all that these require."""
    seen[name, extras] = None
    for requirement in map(Requirement, distribution(name).requires or ()):
        marker, wanted = requirement.marker, (requirement.name, frozenset(requirement.extras))
        if wanted not in seen and (not marker or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))):
            _required(*wanted, seen)
    return seen
