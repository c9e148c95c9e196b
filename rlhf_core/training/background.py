"""Work that goes on beside the training, and whose error is not lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """`function()` in a thread of its own, which does not keep the process alive."""

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._function = function
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value.append(self._function())
        except BaseException as error:  # whoever asks for the result gets it
            self._error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> T:
        """Waits for the end. Raises what the function raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value[0]
