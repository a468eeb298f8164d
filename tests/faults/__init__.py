"""Programs of jobs that are broken on purpose, and what sees where they are."""
