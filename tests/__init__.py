"""A package, so that child processes and tests name the same modules (`tests.support.…`)."""
