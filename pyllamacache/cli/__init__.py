"""The commands of `pyllamacache`, one module each, ending in its `COMMAND`; `__main__` lists them."""
