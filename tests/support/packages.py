"""Where the packages are installed: in this folder, or from a wheel."""

from pathlib import Path

import agentrl
import agentrl_credit
import agentrl_envs

PACKAGES = {package.__name__: Path(str(package.__file__)).parent for package in (agentrl, agentrl_envs, agentrl_credit)}
"""Their folders, by name."""


def modules(package: Path) -> list[Path]:
    """List the modules of a package, without the programs that the environment `repository` has repaired."""
    return [path for path in sorted(package.rglob("*.py")) if "repository" not in path.parts]
