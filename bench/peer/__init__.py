"""One way to talk to pyllamacache, llama-server and llama-cpp-python, each in a process of its own."""
