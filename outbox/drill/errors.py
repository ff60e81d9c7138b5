"""What can go wrong with a drill itself, as opposed to what a drill finds."""

from __future__ import annotations


class DrillError(Exception):
    """The drill cannot be run, or cannot go on. The message says why and what to do."""


class WaitedInVain(Exception):
    """A point did not get as far as it should: what was awaited, and the log of who was to act."""
