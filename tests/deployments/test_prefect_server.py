"""What the Prefect server of the local stack does otherwise than Prefect's own."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tests.cluster import service_environment

# SQLite's wait for another's write, in place of Prefect's 60 s: it times out only if the event loop blocks.
BUSY_SECONDS = 10
BLOCKING = "update_cache_after_commit"  # of Prefect


def engine(path: Path) -> AsyncEngine:
    """Set up as Prefect does it."""
    made = create_async_engine(f"sqlite+aiosqlite:///{path}", paramstyle="named")

    @event.listens_for(made.sync_engine, "connect")
    def set_up(connection, record) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000}")
        cursor.close()

    return made


async def write_after_a_failure(path: Path) -> str:
    """What the second use of a connection ends with, when what is left of its first, which failed, is collected while
    it waits for another's write."""
    database = engine(path)
    async with database.connect() as one, database.connect() as two:
        await one.exec_driver_sql("CREATE TABLE numbers (number)")
        await two.exec_driver_sql("SELECT 1")  # two connections, so that the second is the next one's too
    async with database.connect() as writer:
        async with database.connect() as reader:
            await reader.exec_driver_sql("BEGIN DEFERRED")
            await reader.exec_driver_sql("SELECT * FROM numbers")
            await writer.exec_driver_sql("BEGIN IMMEDIATE")
            await writer.exec_driver_sql("INSERT INTO numbers VALUES (1)")
            kept: BaseException | None = None
            try:
                await reader.exec_driver_sql("UPDATE numbers SET number = 2")
            except OperationalError as error:
                kept = error  # as a log record keeps it
            assert "database is locked" in str(kept)
            await reader.exec_driver_sql("ROLLBACK")

        async def write() -> str:
            async with database.connect() as next_one:
                try:
                    await next_one.exec_driver_sql("BEGIN IMMEDIATE")
                except OperationalError as error:
                    return str(error.orig)
                await next_one.exec_driver_sql("ROLLBACK")
            return "written"

        waiting = asyncio.create_task(write())
        await asyncio.sleep(0.5)
        kept = None
        gc.collect()
        await writer.exec_driver_sql("COMMIT")
        result = await waiting
    await database.dispose()
    return result


def run_after(before: str, scenario: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What a process prints of `scenario`, a coroutine of this file, after `before`, a function of the server's."""
    code = (
        "import asyncio, pathlib\n"
        "from deployments.stack.prefect_server import *\n"
        "from tests.deployments.test_prefect_server import *\n"
        f"folder = pathlib.Path({str(folder)!r})\n{before}\nprint(asyncio.run({scenario}))"
    )
    environment = service_environment(
        PREFECT_HOME=str(folder), PREFECT_API_DATABASE_CONNECTION_URL=f"sqlite+aiosqlite:///{folder}/prefect.db"
    )
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("before", "result"), [("close_failed_cursors()", "written"), ("pass", "database is locked")])
def test_a_failed_statement_does_not_block_the_event_loop(tmp_path: Path, before: str, result: str) -> None:
    """Without our server's difference it does. Once that fails, the difference can go."""
    done = run_after(before, "write_after_a_failure(folder / 'x.db')", tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{result}\n"), done.stderr


def end_when_blocked() -> None:
    """Ends this process once its event loop has stood still where Prefect blocks it: however slow the machine is."""
    looks = 0
    while looks < 5:
        time.sleep(0.5)
        main = sys._current_frames()[threading.main_thread().ident]
        looks = looks + 1 if any(each.name == BLOCKING for each in traceback.extract_stack(main)) else 0
    print(f"blocked in {BLOCKING}", file=sys.stderr, flush=True)
    os._exit(1)


async def create_an_automation_while_all_are_compared() -> str:
    from prefect.server.database import provide_database_interface
    from prefect.server.events import triggers
    from prefect.server.events.models import automations
    from prefect.server.events.schemas.automations import Automation

    database = provide_database_interface()
    async with (await database.engine()).begin() as connection:
        tables = [database.Automation.__table__, database.AutomationRelatedResource.__table__]
        await connection.run_sync(database.Base.metadata.create_all, tables=tables)
    trigger = {"type": "event", "posture": "Reactive", "expect": ["x"], "threshold": 1, "within": 0}
    given = {"name": "test", "trigger": trigger, "actions": [{"type": "do-nothing"}]}

    async def create() -> None:
        async with automations.automations_session(begin_transaction=True) as session:
            await automations.create_automation(session=session, automation=Automation.model_validate(given))

    threading.Thread(target=end_when_blocked, daemon=True).start()
    async with triggers._automations_lock():  # as `reconcile_automations` holds it
        await asyncio.create_task(create())
    while not triggers.automations_by_id:
        await asyncio.sleep(0.01)
    return ", ".join(automation.name for automation in triggers.automations_by_id.values())


@pytest.mark.parametrize(("before", "result"), [("load_automations_in_the_loop()", "test\n"), ("pass", "")])
def test_an_automation_that_is_created_does_not_block_the_event_loop(tmp_path: Path, before: str, result: str) -> None:
    """Without our server's difference it does, for ever. Once that fails, the difference can go."""
    done = run_after(before, "create_an_automation_while_all_are_compared()", tmp_path)
    assert done.stdout == result, done.stderr
    assert (f"blocked in {BLOCKING}" in done.stderr) == (not result)
