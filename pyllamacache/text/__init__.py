"""Arguments and prompts to checked values; token bytes to text as they come. Knows no slots, no memory, no native."""
