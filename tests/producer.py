"""A process that writes a row and owes a task for it: `python -m tests.producer NAME PATH`."""

import os
import sys

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
django.setup()


def main(name: str, path: str) -> None:
    from django.contrib.auth.models import Group
    from django.db import transaction

    from tests import tasks

    with transaction.atomic():
        Group.objects.create(name=name)
        tasks.noted.delay(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
