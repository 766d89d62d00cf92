"""What is kept: host memory for states, slot files on disk, and what a model's files are before native code opens them.

Knows bytes, sizes and digests. Never what a token means, never native.
"""
