"""The recovery drill: real processes, killed at each stop point, and their record inspected."""
