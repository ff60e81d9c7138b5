"""`make bench`: what the outbox costs, as ratios over paired rounds against real alternatives."""
