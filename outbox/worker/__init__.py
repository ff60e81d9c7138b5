"""The places where Celery's worker is touched, a file each."""
