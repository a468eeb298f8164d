"""Look at directories of checkpoints, compare epochs, tidy up: for notebooks, terminals and programs.

Promises: only `gc` changes anything; nothing is imported from the training code, no device is used; facts are computed
once, as rows (`epochckpt.inspection.rows`), and every view draws the same rows.
"""
