"""What is kept: host memory, slot files, a shared folder on disk; and what a model's files are before they are loaded.

Knows bytes, sizes and digests. Never what a token means, never native.
"""
