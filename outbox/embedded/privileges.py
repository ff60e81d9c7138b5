"""Running a program as an ordinary user where we are root."""

import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path

from outbox.embedded.errors import EmbeddedError


def ordinary_user() -> tuple[int, int]:
    nobody = pwd.getpwnam("nobody")
    return nobody.pw_uid, nobody.pw_gid


def unprivileged(argv: list[str | Path], death_signal: signal.Signals) -> list[str | Path]:
    """`argv` as `nobody` where we are root, as whom PostgreSQL refuses to run.

    `nobody` keeps the one capability that lets it pass parent folders that only root may enter;
    the other way would be to open those folders to everybody. `no_setuid_fixup` makes access(2)
    respect that capability. Changing the user clears the death signal, so it is set here again.
    """
    if os.geteuid() != 0:
        return argv
    user, group = ordinary_user()
    setpriv = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups"]
    setpriv += ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    setpriv += ["--securebits=+no_setuid_fixup", f"--pdeathsig={death_signal.name[3:]}", "--"]
    try:
        subprocess.run(
            [*setpriv, sys.executable, "-I", "-S", "-c", ""], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise EmbeddedError(
            "PostgreSQL refuses to run as root, and setpriv cannot change to the user nobody here:"
            " run this as an ordinary user."
        ) from error
    return [*setpriv, *argv]
