"""The environment `tools`: toolsets, and calls of the policy."""
