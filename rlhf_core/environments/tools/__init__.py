"""The environment `tools`: toolsets, calls of the policy, and the sandbox for code."""
