"""What the Prefect server of the local stack does otherwise than Prefect's own."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import event, insert, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tests.cluster import LOOPBACK, Service, service_environment
from tests.services import free_ports

pytestmark = pytest.mark.endurance("chaos")

# SQLite's wait for another's write, in place of Prefect's 60 s: it times out only if the event loop blocks.
BUSY_SECONDS = 10
BLOCKING = "update_cache_after_commit"  # of Prefect
CLIENTS, TURNS = 4, 5
# What Prefect does by itself, which only another version of it changes.
BY_ITSELF = pytest.mark.endurance("benchmarks")


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


@pytest.mark.parametrize(
    ("before", "result"),
    [("close_failed_cursors()", "written"), pytest.param("pass", "database is locked", marks=BY_ITSELF)],
)
@pytest.mark.slow("a Prefect server under load")
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


@pytest.mark.parametrize(
    ("before", "result"), [("load_automations_in_the_loop()", "test\n"), pytest.param("pass", "", marks=BY_ITSELF)]
)
def test_an_automation_that_is_created_does_not_block_the_event_loop(tmp_path: Path, before: str, result: str) -> None:
    """Without our server's difference it does, for ever. Once that fails, the difference can go."""
    done = run_after(before, "create_an_automation_while_all_are_compared()", tmp_path)
    assert done.stdout == result, done.stderr
    assert (f"blocked in {BLOCKING}" in done.stderr) == (not result)


async def read_then_write_beside_another_writer() -> str:
    from prefect.server.database import provide_database_interface

    database = provide_database_interface()
    async with (await database.engine()).begin() as connection:
        await connection.run_sync(database.Base.metadata.create_all, tables=[database.Flow.__table__])

    async def add(name: str) -> str:
        async with database.session_context(begin_transaction=True) as session:
            await session.execute(select(database.Flow.id))
            await asyncio.sleep(0.5)
            try:
                await session.execute(insert(database.Flow).values(name=name))
            except OperationalError as error:
                return str(error.orig)
        return name

    return ", ".join(sorted(await asyncio.gather(add("one"), add("two"))))


@pytest.mark.parametrize(
    ("before", "result"),
    [("begin_as_a_writer()", "one, two"), pytest.param("pass", "database is locked", marks=BY_ITSELF)],
)
def test_a_transaction_that_reads_before_it_writes_waits_for_its_turn(tmp_path: Path, before: str, result: str) -> None:
    """Without our server's difference it fails at once. Once that fails, the difference can go."""
    done = run_after(before, "read_then_write_beside_another_writer()", tmp_path)
    assert (done.returncode, result in done.stdout) == (0, True), done.stderr


@pytest.mark.slow("a Prefect server under load")
def test_schedules_are_toggled_and_runs_are_scheduled_under_load(tmp_path: Path) -> None:
    """By as many clients at once as a loaded stack has, without a request that fails or a word of a lock in the log."""
    log, (port,) = tmp_path / "prefect.log", free_ports(1)
    command = [sys.executable, "-m", "deployments.stack.prefect_server", "--host", LOOPBACK, "--port", str(port)]
    server = Service(
        command, log, service_environment(PREFECT_HOME=str(tmp_path), PREFECT_SERVER_ANALYTICS_ENABLED="false")
    )
    try:
        server.wait_for(f"http://{LOOPBACK}:{port}/api/health")
        with httpx.Client(base_url=f"http://{LOOPBACK}:{port}/api", timeout=60) as client:
            post(client, "/work_pools/", name="pool", type="process")
            flow = post(client, "/flows/", name="flow")["id"]
            schedule = {"active": True, "schedule": {"interval": 60}}
            made = [
                post(client, "/deployments/", name=str(each), flow_id=flow, work_pool_name="pool", schedules=[schedule])
                for each in range(CLIENTS)
            ]
        with ThreadPoolExecutor(2 * CLIENTS) as threads:
            jobs = [threads.submit(toggle, port, deployment) for deployment in made]
            jobs += [threads.submit(poll, port, deployment["id"]) for deployment in made]
            for job in jobs:
                job.result()
        assert "database is locked" not in log.read_text()
    finally:
        server.end()


def post(client: httpx.Client, path: str, **content: object) -> Any:
    answer = client.post(path, json=content)
    assert answer.is_success, answer.text
    return answer.json() if answer.content else None


def toggle(port: int, deployment: dict[str, Any]) -> None:
    path = f"/deployments/{deployment['id']}/schedules/{deployment['schedules'][0]['id']}"
    with httpx.Client(base_url=f"http://{LOOPBACK}:{port}/api", timeout=60) as client:
        for turn in range(TURNS):
            client.patch(path, json={"active": bool(turn % 2)}).raise_for_status()


def poll(port: int, deployment: str) -> None:
    """As a worker does it, and a run of the deployment."""
    with httpx.Client(base_url=f"http://{LOOPBACK}:{port}/api", timeout=60) as client:
        for turn in range(TURNS):
            post(client, "/work_pools/pool/workers/heartbeat", name=deployment)
            post(client, "/work_pools/pool/get_scheduled_flow_runs")
            run = post(client, f"/deployments/{deployment}/create_flow_run")["id"]
            post(client, f"/flow_runs/{run}/set_state", state={"type": "RUNNING"})
            lines = [{"name": "x", "level": 20, "message": str(turn), "timestamp": now(), "flow_run_id": run}]
            post(client, "/artifacts/", key="progress", type="progress", data=turn, flow_run_id=run)
            client.post("/logs/", json=lines).raise_for_status()
            post(client, f"/flow_runs/{run}/set_state", state={"type": "COMPLETED"})


def now() -> str:
    return datetime.now(UTC).isoformat()
