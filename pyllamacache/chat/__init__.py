"""Messages to a prompt and back: templates, tool calls, conversations, usage shapes. Knows no native code."""
