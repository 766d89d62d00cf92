"""Which prefixes exist, and what a request would reuse of them: ids, lengths, cells.

Pure: the same code decides in the engine and in a simulation without a model. Never bytes, never native.
"""
