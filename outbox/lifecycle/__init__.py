"""The life of a job, a file for each step."""
