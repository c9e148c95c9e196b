"""The tool of this run: change it as you like; the stages that use it are then computed again."""


def multiply(a: int, b: int) -> int:
    """The product of two whole numbers."""
    return a * b
