"""The only room where C is visible. Nothing is loaded until `library.load()` is called."""
