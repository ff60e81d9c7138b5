"""A small shop that owes a receipt for every order: the example application."""

from shop.celery import app as celery_app

__all__ = ["celery_app"]
