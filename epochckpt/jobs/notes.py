"""Where the runner's notes lie in an epoch."""

NOTES = "job_runner"  # under this name the runner's notes are in an epoch's custom metadata
