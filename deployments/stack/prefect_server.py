"""The Prefect server of the local stack: `python -m deployments.stack.prefect_server --host HOST --port PORT`.

It is `prefect server start` with one difference (Prefect 3.7.7, SQLAlchemy 2.0.58, aiosqlite 0.22.1). There a statement
that fails, most often since another one writes, leaves its cursor to the garbage collector. That resets the statement
in the event loop's thread, which waits for the connection; if that is in use again and waits for another's write, which
waits for the event loop, it is a deadlock: the server hangs until SQLite's wait times out after 60 s, again and again.
Here the cursor is closed by the connection's own thread, before anything else happens there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import aiosqlite


def close_failed_cursors() -> None:
    """For all connections of this process."""
    aiosqlite.Cursor._execute = _execute  # type: ignore[method-assign, assignment]


async def _execute(self: aiosqlite.Cursor, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    try:
        return await self._conn._execute(function, *arguments, **options)  # type: ignore[no-untyped-call]
    except BaseException:  # a cancelled request leaves its cursor too
        self._conn._tx.put_nowait((None, self._cursor.close))  # the thread takes its work in this order
        raise


def main() -> None:
    close_failed_cursors()
    from prefect.cli import app

    sys.argv = ["prefect", "server", "start", *sys.argv[1:]]
    app()


if __name__ == "__main__":
    main()
