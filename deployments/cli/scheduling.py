"""Schedules of loops: one of the deployment `iterative-dpo/scheduled` for each, with the name of the loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from zoneinfo import available_timezones

from prefect._vendor.croniter import CroniterBadDateError, CroniterError, croniter  # as the server reads it
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from pydantic import ValidationError

from deployments.cli.prefect_server import asking_for, prefect_api
from rlhf_core.errors import RecipeError, did_you_mean
from rlhf_core.recipe.loading import load_recipe

DEPLOYMENT = "iterative-dpo/scheduled"
_FIELDS = 5
_SHORTEST, _LONGEST = 0.1, 1_000_000  # minutes between two rounds


@dataclass(frozen=True, slots=True)
class Schedule:
    loop: str
    recipe: str  # its name, or its file's absolute path
    overrides: tuple[str, ...]
    cron: str  # or empty
    every: float  # minutes, or 0
    timezone: str
    budget: float | None = None  # of the loop

    def when(self) -> CronSchedule | IntervalSchedule:
        """Return Prefect's schedule. Raises RecipeError unless exactly one valid time is given."""
        if bool(self.cron) == bool(self.every):
            raise RecipeError("say when by either --cron, such as '0 3 * * *', or --every, minutes between two rounds")
        if self.every:
            if not _SHORTEST <= self.every <= _LONGEST:  # nan is not
                raise RecipeError(f"--every is {self.every:g}: it must be from {_SHORTEST} to {_LONGEST} minutes")
            return IntervalSchedule(interval=timedelta(minutes=self.every), anchor_date=datetime.now(UTC))
        if self.timezone not in (zones := {"UTC", *available_timezones()}):
            raise RecipeError(
                f"--timezone {self.timezone!r}: there is no such time zone{did_you_mean(self.timezone, zones)}: give "
                "one such as Europe/Berlin"
            )
        try:
            if len(self.cron.split()) > _FIELDS:  # a sixth is seconds
                raise CroniterError
            schedule = CronSchedule(cron=self.cron, timezone=self.timezone)
            croniter(self.cron, datetime.now(UTC)).get_next()  # type: ignore[no-untyped-call]
        except CroniterBadDateError:
            raise RecipeError(f"--cron {self.cron!r}: there is no such day, so no round would ever run") from None
        except (ValidationError, CroniterError) as error:
            raise RecipeError(
                f"--cron {self.cron!r} is not a cron expression: give five fields, such as '0 3 * * *' for each night "
                "at 3"
            ) from error
        return schedule


class ScheduleRow(NamedTuple):
    loop: str
    when: str
    active: str
    recipe: str
    overrides: str
    budget: float | None


def require_a_loop(*, off: bool, cron: str, every: float, overrides: Sequence[str]) -> None:
    """Raise RecipeError if a call without a recipe does more than list the schedules."""
    if off or cron or every or overrides:
        first_argument = "--off" if off else "--cron" if cron else "--every" if every else overrides[0]
        raise RecipeError(
            f"{first_argument} needs a recipe: name the loop that is meant, as in `alignment schedule my-loop.yaml`"
        )


def set_schedule(schedule: Schedule) -> None:
    """Replace the loop's schedule, if it has one. Raises RecipeError, StackError."""
    when = schedule.when()
    parameters: dict[str, Any] = {"recipe": schedule.recipe, "overrides": list(schedule.overrides)}
    if schedule.budget is not None:
        parameters["budget"] = schedule.budget
    with _deployment() as (client, deployment):
        existing = _of(deployment, schedule.loop)
        if existing is None:
            new_schedule = DeploymentScheduleCreate(
                schedule=when, active=True, parameters=parameters, slug=schedule.loop
            )
            client.create_deployment_schedules(deployment.id, [new_schedule])
        else:
            client.update_deployment_schedule(
                deployment.id, existing.id, active=True, schedule=when, parameters=parameters
            )


def remove_schedule(recipe: str, overrides: Sequence[str]) -> None:
    """Remove the schedule. recipe: or the loop's name. Raises RecipeError if the loop has none, StackError."""
    unreadable: RecipeError | None = None
    try:
        loop = load_recipe(recipe, overrides).recipe.name
    except RecipeError as error:  # gone, or damaged
        loop, unreadable = recipe, error
    with _deployment() as (client, deployment):
        existing = _of(deployment, loop)
        if existing is None:
            if unreadable is not None:
                raise unreadable
            slugs = ", ".join(str(schedule.slug) for schedule in deployment.schedules) or "none"
            raise RecipeError(f"the loop {loop} has no schedule; there are {slugs}")
        client.delete_deployment_schedule(deployment.id, existing.id)


def schedules() -> list[ScheduleRow]:
    """Return the schedules of all loops. Raises StackError."""
    with _deployment() as (_, deployment):
        return [
            ScheduleRow(
                str(schedule.slug),
                _words(schedule),
                "yes" if schedule.active else "no",
                str(schedule.parameters.get("recipe", deployment.parameters.get("recipe", ""))),
                " ".join(schedule.parameters.get("overrides", ())),
                schedule.parameters.get("budget"),
            )
            for schedule in deployment.schedules
        ]


@contextmanager
def _deployment() -> Iterator[tuple[SyncPrefectClient, DeploymentResponse]]:
    with asking_for(DEPLOYMENT, prefect_api()), get_client(sync_client=True) as client:
        yield client, client.read_deployment_by_name(DEPLOYMENT)


def _of(deployment: DeploymentResponse, loop: str) -> DeploymentSchedule | None:
    return next((schedule for schedule in deployment.schedules if schedule.slug == loop), None)


def _words(schedule: DeploymentSchedule) -> str:
    match schedule.schedule:
        case CronSchedule(cron=cron, timezone=timezone):
            return f"{cron} ({timezone or 'UTC'})"
        case IntervalSchedule(interval=interval):
            return f"every {interval.total_seconds() / 60:g} min"
        case other:
            return str(other)
