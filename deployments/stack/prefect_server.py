"""The Prefect server of the local stack: `python -m deployments.stack.prefect_server --host HOST --port PORT`.

It is `prefect server start` with three differences (Prefect 3.7.7, SQLAlchemy 2.0.58, aiosqlite 0.22.1): two
prevent deadlocks of its event loop, in which the server hangs, and one prevents failing requests.

A failed statement, most often after a concurrent write, leaves its cursor to the garbage collector. That resets the
statement in the event loop's thread, which waits for the connection; if that is in use again and waits for another's
write, which waits for the event loop, the server hangs until SQLite's wait times out after 60 s, again and again.
Here the cursor is closed by the connection's own thread, before anything else happens there.

A created or changed automation is loaded by another event loop, for which the server's waits, under a lock
that a coroutine of the server's own loop may hold, as it compares automations with the database every few seconds: a
deadlock. Here the server's loop loads it (PrefectHQ/prefect issue 23055).

A transaction that reads and then writes fails with "database is locked" if another one wrote in between. SQLite does
not wait then, whatever `busy_timeout` is (60 s, with a write-ahead log), since its snapshot is outdated. Requests
fail, such as the toggle of a schedule, and so do tasks in the background, hundreds in an hour of load. Prefect can
begin a transaction as a writer, which waits for its turn, and does so for some: here for all of them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiosqlite
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction


def close_failed_cursors() -> None:
    """Patch all connections of this process to close failed cursors."""
    aiosqlite.Cursor._execute = _execute  # type: ignore[method-assign, assignment]


async def _execute(self: aiosqlite.Cursor, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    try:
        return await self._conn._execute(function, *arguments, **options)  # type: ignore[no-untyped-call]
    except BaseException:  # a cancelled request leaves its cursor too
        self._conn._tx.put_nowait((None, self._cursor.close))  # the thread takes its work in this order
        raise


def load_automations_in_the_loop() -> None:
    """Patch the loading of automations that this process creates or changes."""
    from prefect.server.events.models import automations

    automations.run_coro_as_sync = _in_the_loop  # type: ignore[assignment]


_tasks: set[asyncio.Task[Any]] = set()  # a loop keeps no reference to its tasks


def _in_the_loop(coroutine: Coroutine[Any, Any, Any]) -> None:
    task = asyncio.get_running_loop().create_task(coroutine)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


def begin_as_a_writer() -> None:
    """Begin all transactions of this process as writers. Prefect nests no second one inside, which would deadlock."""
    from prefect.server.database.configurations import AioSqliteConfiguration

    begin = AioSqliteConfiguration.begin_transaction

    def begin_transaction(
        self: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False
    ) -> AbstractAsyncContextManager[AsyncSessionTransaction]:
        return begin(self, session, with_for_update=True)

    AioSqliteConfiguration.begin_transaction = begin_transaction  # type: ignore[method-assign, assignment]


def main() -> None:
    close_failed_cursors()
    load_automations_in_the_loop()
    begin_as_a_writer()
    from prefect.cli import app

    sys.argv = ["prefect", "server", "start", *sys.argv[1:]]
    app()


if __name__ == "__main__":
    main()
