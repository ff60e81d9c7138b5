"""A client of the broker that asks without pause and says how long it waited at most, in ms."""

import os
import sys
import threading
import time

import redis


def main() -> None:
    client = redis.Redis.from_url(os.environ["CELERY_BROKER_URL"])
    told = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), told.set()), daemon=True).start()
    client.ping()
    print("begun", flush=True)
    longest = 0.0
    while not told.is_set():
        start = time.perf_counter()
        client.ping()
        longest = max(longest, time.perf_counter() - start)
        time.sleep(0.001)
    print(1000 * longest)


if __name__ == "__main__":
    main()
