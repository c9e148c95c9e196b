"""Settings of environments and tools, and their tables."""
