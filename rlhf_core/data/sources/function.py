"""Rows of a user's function."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Iterable, Iterator

from rlhf_core.config.data.sources import FunctionSource
from rlhf_core.contract import StageContext
from rlhf_core.data.formats import RowError
from rlhf_core.data.sources.base import BadRow, Located, RowSource
from rlhf_core.errors import StageError
from rlhf_core.processes.user_code import load_function, user_error, why_unfit


class RowFunction(RowSource[FunctionSource]):
    """A plan does not call the function: it checks the code beside that of rewards."""

    def rows(self, context: StageContext, data_format: str, bad_row: BadRow) -> Iterator[Located]:
        source = self.config
        function = load_function(context.user_file(source.path), source.function, source.path)
        name = f"{source.path}:{source.function}"
        try:
            inspect.signature(function).bind(**source.options)
        except (TypeError, ValueError) as error:
            problem = why_unfit(error)
            raise StageError(f"{name} does not take the options {sorted(source.options)}: {problem}") from error
        try:
            returned = function(**source.options)
            rows = list(returned) if isinstance(returned, Iterable) else None
        except (Exception, SystemExit) as error:  # the user's code may raise anything; it is shown to them as it is
            if isinstance(error, SystemExit) and error.code == signal.SIGTERM:
                raise  # the job is stopped, and Ray has put its own handler in place
            raise StageError(f"{name} raised {user_error(error)}") from error
        if rows is None:
            raise StageError(f"{name} returned {type(returned).__name__}: it must return the rows, a list of dicts")
        for index, row in enumerate(rows):
            if isinstance(row, dict):
                yield f"{name} item {index}", row
            else:
                bad_row(f"{name} item {index}", RowError(f"is {type(row).__name__}, expected a dict", "not a dict"))
