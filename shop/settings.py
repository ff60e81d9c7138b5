"""Settings of the shop. Everything that differs between machines comes from the environment."""

import os
from pathlib import Path
from urllib.parse import urlsplit

import dj_database_url
from django.core.exceptions import ImproperlyConfigured

BASE_DIR = Path(__file__).resolve().parent.parent


def env(name: str, default: str = "") -> str:
    return os.environ.get(name, default)


def env_flag(name: str) -> bool:
    return env(name).strip().lower() in {"1", "true", "yes", "on"}


def env_choice(name: str, *choices: str) -> str:
    """One of the choices; the first is the default."""
    value = env(name, choices[0])
    if value not in choices:
        raise ImproperlyConfigured(f"{name}={value} is not known: choose {' or '.join(choices)}.")
    return value


def env_seconds(name: str, default: str) -> float:
    value = env(name, default)
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0
    if not 0 < seconds <= 3600:
        raise ImproperlyConfigured(
            f"{name}={value} is no usable time: give seconds, more than 0, at most 3600."
        )
    return seconds


def env_http(name: str, *, needed: bool) -> str:
    """The address of an HTTP API, without a slash at its end; empty where it is not needed."""
    value = env(name).rstrip("/")
    try:
        url = urlsplit(value)
        usable = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:  # no port, or no IPv6 address
        usable = False
    if value and not (value.isprintable() and value.isascii() and " " not in value and usable):
        raise ImproperlyConfigured(f"{name}={value} is no http:// or https:// URL.")
    if needed and not value:
        raise ImproperlyConfigured(f"RECEIPTS_BY=provider needs its address: set {name}.")
    return value


def env_token(name: str) -> str:
    value = env(name)
    if not (value.isascii() and (value.isprintable() or not value)):
        raise ImproperlyConfigured(f"{name} has characters that no HTTP header can carry.")
    return value


def env_list(name: str, default: str = "") -> list[str]:
    return [item.strip() for item in env(name, default).split(",") if item.strip()]


# Who may ask, and how much is told.

LOCAL_HOSTS = ["localhost", "127.0.0.1", "[::1]"]

DEBUG = env_flag("DJANGO_DEBUG")
ALLOWED_HOSTS = env_list("DJANGO_ALLOWED_HOSTS", ",".join(LOCAL_HOSTS))
CSRF_TRUSTED_ORIGINS = env_list("DJANGO_CSRF_TRUSTED_ORIGINS")

# A fresh clone runs without a key, because it answers to this machine only. As soon as it
# answers to any other name, the published key would let anybody forge a session.
SECRET_KEY = env("DJANGO_SECRET_KEY")
if not SECRET_KEY:
    if not DEBUG and not set(ALLOWED_HOSTS) <= set(LOCAL_HOSTS):
        raise ImproperlyConfigured(
            "Set DJANGO_SECRET_KEY to a long random text: DJANGO_ALLOWED_HOSTS lets other"
            " machines in, and the built-in key is public."
        )
    SECRET_KEY = "for-development-on-this-machine-only-everybody-can-read-this-key"

# The application.

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_celery_results",
    "outbox",
    "shop",
    "receipts",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "shop.context.mails",
            ],
        },
    },
]
ROOT_URLCONF = "shop.urls"
WSGI_APPLICATION = "shop.wsgi.application"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
LANGUAGE_CODE = "en-gb"
TIME_ZONE = "UTC"
USE_TZ = True

STATIC_URL = "static/"
STATIC_ROOT = env("DJANGO_STATIC_ROOT") or None
WHITENOISE_USE_FINDERS = True  # so that nobody has to run collectstatic first

# The database: orders, and what is owed for them. The connection is kept between tasks, which
# would otherwise each open their own, and checked first, since the server may have restarted.

DATABASES = {
    "default": dj_database_url.config(
        default="postgres://postgres@127.0.0.1:5432/outbox",
        conn_max_age=600,
        conn_health_checks=True,
    )
}

# Celery. `OutboxTask` acknowledges late by itself; this extends the same to plain tasks.

CELERY_BROKER_URL = env("CELERY_BROKER_URL", "redis://127.0.0.1:6379/0")
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None  # a worker tries for as long as its broker is away
CELERY_BROKER_TRANSPORT_OPTIONS = {  # without a limit, a publish to a dead peer hangs for ever
    "socket_connect_timeout": 5,
    "socket_timeout": 5,
}
CELERY_RESULT_BACKEND = "django-db"
CELERY_RESULT_EXTENDED = True
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TASK_SERIALIZER = "json"
CELERY_RESULT_SERIALIZER = "json"
CELERY_TASK_DEFAULT_QUEUE = "celery"
CELERY_TASK_ACKS_LATE = True
CELERY_TIMEZONE = TIME_ZONE

# The outbox: who hears of an obligation that could not be met. The rest are its defaults.

OUTBOX = {
    "OWNERS": {"shop": env_list("SHOP_OWNERS", "owner@shop.example")},
    "DEFAULT_OWNER": "shop",
}

# Mail. The timeout turns a mail server that never answers into a failure that is tried again.

EMAIL_HOST = env("EMAIL_HOST", "127.0.0.1")
EMAIL_PORT = int(env("EMAIL_PORT", "25"))
EMAIL_HOST_USER = env("EMAIL_HOST_USER")
EMAIL_HOST_PASSWORD = env("EMAIL_HOST_PASSWORD")
EMAIL_USE_TLS = env_flag("EMAIL_USE_TLS")
EMAIL_TIMEOUT = 10
DEFAULT_FROM_EMAIL = env("DEFAULT_FROM_EMAIL", "Paper & Ink <receipts@shop.example>")
SERVER_EMAIL = DEFAULT_FROM_EMAIL

# Receipts: by which way, and what to do where nobody can tell whether one was sent. "repeat" may
# show a customer the same receipt twice, "park" keeps it until a person has looked.

RECEIPTS_BY = env_choice("RECEIPTS_BY", "smtp", "provider")
RECEIPTS_WHEN_UNCERTAIN = env_choice("RECEIPTS_WHEN_UNCERTAIN", "repeat", "park")
RECEIPTS_PROVIDER_URL = env_http("RECEIPTS_PROVIDER_URL", needed=RECEIPTS_BY == "provider")
RECEIPTS_PROVIDER_TOKEN = env_token("RECEIPTS_PROVIDER_TOKEN")
RECEIPTS_PROVIDER_LOOKUP = env_choice("RECEIPTS_PROVIDER_LOOKUP", "on", "off") == "on"
RECEIPTS_TIMEOUT = env_seconds("RECEIPTS_TIMEOUT", "10")  # of each step of a call to the provider

# Where a local mail server leaves its mails as files; with it, the shop shows them at /mails/.
SHOP_MAIL_FOLDER = env("SHOP_MAIL_FOLDER") or None

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "%(asctime)s %(levelname)-7s %(name)s: %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "plain"}},
    "root": {"handlers": ["stderr"], "level": env("LOG_LEVEL", "INFO")},
    "loggers": {
        # Django brings handlers of its own for these; one line in one place is enough.
        "django": {"handlers": [], "level": "INFO", "propagate": True},
        # The local mail server's protocol, line by line.
        "mail.log": {"level": "WARNING"},
    },
}
