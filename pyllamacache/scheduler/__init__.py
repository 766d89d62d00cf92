"""The scheduler thread: sole owner of the backend, the cell ledger and the slots. See the room map in README.md."""
