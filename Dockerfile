# The example shop: one image for web, worker, beat and migrations.
FROM python:3.13-slim

ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

RUN useradd --create-home app
WORKDIR /app

COPY pyproject.toml README.md LICENSE ./
COPY outbox ./outbox
RUN pip install '.[demo]'

COPY manage.py ./
COPY shop ./shop
COPY receipts ./receipts

USER app
EXPOSE 8000
CMD ["waitress-serve", "--listen=*:8000", "shop.wsgi:application"]
