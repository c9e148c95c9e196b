"""The documents that commands print with `--json`. Fields are added to them, and never renamed: programs read them.

Times are ISO 8601 with a zone, durations seconds, sizes bytes; an artifact is named `stage/key` with all its digits.
"""
