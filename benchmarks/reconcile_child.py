"""The process whose memory is measured: `python -m benchmarks.reconcile_child`."""

import json
import re
from pathlib import Path

import django

django.setup()

from benchmarks import worker  # noqa: E402
from outbox.lifecycle.reconcile import reconcile  # noqa: E402


def peak() -> float:
    """The most that this process has had, in MiB. From Linux's own books: getrusage() counts the
    parent's too."""
    kibibytes = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert kibibytes
    return int(kibibytes[1]) / 1024


def main() -> None:
    before = peak()
    found = reconcile(worker.app, using="default")
    print(json.dumps({"queued": found.queued, "mebibytes": peak() - before}))


if __name__ == "__main__":
    main()
