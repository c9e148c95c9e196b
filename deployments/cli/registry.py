"""`alignment alias`, `log`, `promote`, `rollback`, `approve`, `reject` and `protect`: which model is which, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from getpass import getuser
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from deployments.cli import panels
from deployments.cli.artifacts import ARTIFACT
from deployments.cli.console import table_or
from deployments.cli.documents.registry import (
    Aliases,
    AliasLine,
    AliasProtection,
    MoveLine,
    Promotion,
    ProtectionLine,
    RegistryLog,
    Rejection,
    ScoreDifference,
)
from deployments.cli.output import Printed, printing
from rlhf_core.artifacts.aliases import Alias, Evidence, alias_names, list_aliases, moves_of, read_alias
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.opening import open_store, store_url
from rlhf_core.artifacts.promotion import approve as approve_candidate
from rlhf_core.artifacts.promotion import promote as promote_candidate
from rlhf_core.artifacts.promotion import reject as reject_candidate
from rlhf_core.artifacts.promotion import waiting
from rlhf_core.artifacts.protection import CANDIDATE, CHAMPION, ProtectionChange, read_protection
from rlhf_core.artifacts.protection import protect as protect_alias
from rlhf_core.artifacts.registry import move_alias, roll_back
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.artifacts.store import Store
from rlhf_core.errors import StoreError, did_you_mean, one_line
from rlhf_core.evaluation.stored import differences, evaluations_of
from rlhf_core.stages.job_context import node_cache

app = typer.Typer()

_NO_ALIAS = "there is no alias yet: `alignment alias MODEL/ALIAS ARTIFACT` sets one"
_MODEL = typer.Argument(help="Model of the registry, such as support-bot.")
_ALIAS = typer.Argument(metavar="MODEL/ALIAS", help="Alias, such as support-bot/champion.")
_REASON = typer.Option(help="Reason, kept with the move.")
_APPROVE_BY = typer.Option(metavar="NAME", help="Person who allows a move of a protected alias; needs --reason.")
_LOOKED_AT = typer.Option("--candidate", metavar="ARTIFACT", help="Do nothing if the candidate is another one by now.")


@printing(app, panels.MODELS)
def alias(
    name: Annotated[
        str | None, typer.Argument(metavar="[MODEL/ALIAS]", help="Alias, such as support-bot/champion.")
    ] = None,
    artifact: Annotated[str | None, ARTIFACT] = None,
    reason: Annotated[str, _REASON] = "",
    approve_by: Annotated[str, _APPROVE_BY] = "",
) -> Printed[Aliases]:
    """Point an alias at an artifact, or list the aliases.

    A recipe starts from an alias by `{stage: artifact, ref: support-bot/champion}`. Without arguments, all are listed.
    """
    repository = ArtifactRepository(open_store(store_url()))
    if name is None:
        listed = list_aliases(repository.store)
        return Printed(
            Aliases([_alias_line(each, at) for each, at in listed.items()]), [table_or(_alias_table(listed), _NO_ALIAS)]
        )
    model, short = _split(name)
    if artifact is None:
        raise StoreError(f"{name}: give the artifact too that it is to point at; `alignment alias` lists aliases")
    to, evidence = repository.find(artifact).ref, Evidence(approved_by=approve_by)
    moved = move_alias(repository.store, model, short, to, by=getuser(), reason=reason, evidence=evidence)
    return Printed(Aliases([_alias_line(name, moved)]), [_moved(name, moved)])


@printing(app, panels.MODELS)
def log(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL[/ALIAS]]", help="Model or alias; without one, all candidates that wait."),
    ] = None,
) -> Printed[RegistryLog]:
    """Print the moves of a model's aliases, newest first, and the candidates that wait for approval."""
    store = open_store(store_url())
    model, _, short = (name or "").partition("/")
    models = [model] if name is not None else _models(store)
    asked = [(each, waiting(store, each)) for each in models]
    waits = [(each, move) for each, move in asked if move is not None]
    texts: list[RenderableType] = [_waits(each, move) for each, move in waits]
    waiting_lines = [_alias_line(f"{each}/{CANDIDATE}", move) for each, move in waits]
    if name is None:
        none = "no candidate waits for approval: `alignment log MODEL` prints the history of a model"
        return Printed(RegistryLog(waiting_lines, [], []), texts or [none])
    changes = [each for each in reversed(read_protection(store, model).changes) if short in ("", each.alias)]
    aliases = [short] if short else [alias for _, alias in alias_names(store, model)]
    moves = [(f"{model}/{alias}", move) for alias in aliases for move in moves_of(store, model, alias)]
    if not moves and not changes:
        near = did_you_mean(model, _models(store))
        set_by = f"`alignment alias {model}/{short or CHAMPION} ARTIFACT` does"
        raise StoreError(f"no alias {name} has been set{near}: {set_by}")
    moves.sort(key=lambda item: (item[1].moved_at, item[1].sequence), reverse=True)
    document = RegistryLog(
        waiting_lines,
        [_move_line(alias, move) for alias, move in moves],
        [ProtectionLine(f"{model}/{c.alias}", c.protected, c.by, c.reason, c.changed_at) for c in changes],
    )
    history = [_move_table(moves)] if moves else []
    return Printed(document, [*texts, *history, *(_changed(model, change) for change in changes)])


@printing(app, panels.MODELS)
def promote(
    model: Annotated[str, _MODEL],
    to: Annotated[str, typer.Option(metavar="ALIAS", help="Alias to move.")] = CHAMPION,
    reason: Annotated[str, _REASON] = "",
    approve_by: Annotated[str, _APPROVE_BY] = "",
    candidate: Annotated[str | None, _LOOKED_AT] = None,
) -> Printed[Promotion]:
    """Point `champion` at the candidate that a gate has passed.

    The difference between the two is printed.
    """
    store = open_store(store_url())
    expected = _looked_at(store, candidate)
    compared, texts = _differences(store, model, to)
    moved = promote_candidate(store, model, to, by=getuser(), reason=reason, approved_by=approve_by, expected=expected)
    said = f"{model}/{to} is the candidate already" if moved is None else _moved(f"{model}/{to}", moved)
    now = read_alias(store, model, to) if moved is None else moved
    line = None if now is None else _alias_line(f"{model}/{to}", now)
    return Printed(Promotion(line, moved is not None, compared), [*texts, said])


@printing(app, panels.MODELS)
def rollback(
    model: Annotated[str, _MODEL],
    alias: Annotated[str, typer.Option(help="Alias to move.")] = CHAMPION,
    reason: Annotated[str, _REASON] = "",
) -> Printed[Aliases]:
    """Point `champion` at its previous model; a second time, at the one before that."""
    moved = roll_back(open_store(store_url()), model, alias, by=getuser(), reason=reason)
    name = f"{model}/{alias}"
    return Printed(Aliases([_alias_line(name, moved)]), [_moved(name, moved)])


@printing(app, panels.MODELS)
def approve(
    model: Annotated[str, _MODEL],
    candidate: Annotated[str | None, _LOOKED_AT] = None,
    by: Annotated[str | None, typer.Option(metavar="NAME", help="Approver; defaults to the user.")] = None,
    reason: Annotated[str, _REASON] = "",
) -> Printed[Promotion]:
    """Approve the candidate that waits, and point `champion` at it.

    The difference between the two is printed.
    """
    store = open_store(store_url())
    compared, texts = _differences(store, model, CHAMPION)
    user, expected = getuser(), _looked_at(store, candidate)
    moved = approve_candidate(store, model, by=user, approved_by=by or user, reason=reason, expected=expected)
    name = f"{model}/{CHAMPION}"
    return Printed(Promotion(_alias_line(name, moved), moved=True, differences=compared), [*texts, _moved(name, moved)])


@printing(app, panels.MODELS)
def reject(
    model: Annotated[str, _MODEL],
    reason: Annotated[str, typer.Option(help="Reason, kept with the decision.")],
    candidate: Annotated[str | None, _LOOKED_AT] = None,
    by: Annotated[str | None, typer.Option(metavar="NAME", help="Person who rejects it; defaults to the user.")] = None,
) -> Printed[Rejection]:
    """Reject the candidate that waits, so that it cannot be promoted afterwards."""
    store = open_store(store_url())
    expected = _looked_at(store, candidate)
    made = reject_candidate(store, model, by=by or getuser(), reason=reason, expected=expected)
    document = Rejection(model, made.candidate.full, made.gate.full, made.by, made.reason, made.decided_at)
    return Printed(document, [f"{made.candidate} is rejected by {one_line(made.by)} ({one_line(made.reason)})"])


@printing(app, panels.MODELS)
def protect(
    name: Annotated[str, _ALIAS],
    off: Annotated[bool, typer.Option("--off", help="End the protection; needs --reason.")] = False,
    reason: Annotated[str, typer.Option(help="Reason, kept with the change.")] = "",
) -> Printed[AliasProtection]:
    """Protect an alias, so that only a passed gate or a named approver moves it.

    `champion` is protected by default.
    """
    model, short = _split(name)
    changed = protect_alias(open_store(store_url()), model, short, protected=not off, by=getuser(), reason=reason)
    state = "no longer protected" if off else "protected"
    text = f"{name} is {state}{'' if changed else ', as before'}"
    return Printed(AliasProtection(name, not off, changed), [text])


def _models(store: Store) -> list[str]:
    """Return the names of the models that have aliases."""
    return list(dict.fromkeys(model for model, _ in alias_names(store)))


def _split(name: str) -> tuple[str, str]:
    model, slash, alias = name.partition("/")
    if not slash:
        raise StoreError(f"`{name}`: give the model's name too, such as support-bot/{name}")
    return model, alias


def _looked_at(store: Store, candidate: str | None) -> ArtifactRef | None:
    return None if candidate is None else ArtifactRepository(store).resolve(candidate)


def _alias_line(name: str, alias: Alias) -> AliasLine:
    previous = None if alias.previous is None else alias.previous.full
    return AliasLine(name, alias.manifest.full, previous, alias.by, alias.reason, alias.moved_at)


def _alias_table(aliases: Mapping[str, Alias]) -> Table:
    table = Table()
    for column in ("alias", "artifact", "since", "by", "reason"):
        table.add_column(column, overflow="fold", no_wrap=column in ("alias", "artifact", "since"))
    for name, alias in aliases.items():
        table.add_row(name, str(alias.manifest), f"{alias.moved_at:%Y-%m-%d %H:%M}", alias.by, alias.reason)
    return table


def _move_line(name: str, move: Alias) -> MoveLine:
    evidence = move.evidence
    return MoveLine(
        alias=name,
        number=move.sequence,
        artifact=move.manifest.full,
        previous=None if move.previous is None else move.previous.full,
        by=move.by,
        reason=move.reason,
        moved=move.moved_at,
        gate=None if evidence.gate is None else evidence.gate.full,
        approved_by=evidence.approved_by,
        restores=evidence.restores,
    )


def _move_table(moves: Sequence[tuple[str, Alias]]) -> Table:
    table = Table()
    for column in ("when", "alias", "move", "from", "to", "by", "evidence", "why"):
        table.add_column(column, overflow="fold", no_wrap=column in ("when", "alias", "from", "to"))
    for name, move in moves:
        before = "" if move.previous is None else str(move.previous)
        table.add_row(
            f"{move.moved_at:%Y-%m-%d %H:%M:%S}", name.partition("/")[2], str(move.sequence), before,
            str(move.manifest), one_line(move.by), _evidence(move), one_line(move.reason),
        )  # fmt: skip
    return table


def _evidence(move: Alias) -> str:
    evidence = move.evidence
    parts = [
        f"gate {evidence.gate}" if evidence.gate is not None else "",
        f"approved by {one_line(evidence.approved_by)}" if evidence.approved_by else "",
        f"back to move {evidence.restores}" if evidence.restores is not None else "",
    ]
    return ", ".join(filter(None, parts))


def _waits(model: str, asked: Alias) -> str:
    return (
        f"{model}/{CANDIDATE}, {asked.manifest}, waits for a person since {asked.moved_at:%Y-%m-%d %H:%M} "
        f"({one_line(asked.reason)}): alignment approve {model} --candidate {asked.manifest}"
    )


def _changed(model: str, change: ProtectionChange) -> str:
    state = "protected" if change.protected else "no longer protected"
    reason = f" ({one_line(change.reason)})" if change.reason else ""
    return f"{change.changed_at:%Y-%m-%d %H:%M:%S} {model}/{change.alias} {state} by {one_line(change.by)}{reason}"


def _moved(name: str, moved: Alias) -> str:
    before = f", before {moved.previous}" if moved.previous is not None else ""
    return f"{name} → {moved.manifest}{before}"


def _differences(store: Store, model: str, alias: str) -> tuple[list[ScoreDifference], list[RenderableType]]:
    """Return how the candidate differs from the alias, by the evaluations that both have, and the same for people."""
    candidate, present = read_alias(store, model, CANDIDATE), read_alias(store, model, alias)
    if candidate is None or present is None or candidate.manifest == present.manifest:
        return [], []
    table = Table(title=f"{candidate.manifest} against {alias} {present.manifest}")
    for column in ("score", "difference", "95 % interval", "prompts"):
        table.add_column(column, justify="left" if column == "score" else "right")
    compared: list[ScoreDifference] = []
    repository, models = ArtifactRepository(store), (present.manifest, candidate.manifest)
    for each in differences(repository, *models, evaluations_of(repository, models), node_cache()):
        compared.append(ScoreDifference(each.metric, each.value, each.low, each.high, each.prompts))
        table.add_row(each.metric, f"{each.value:+.3f}", f"{each.low:+.3f} to {each.high:+.3f}", str(each.prompts))
    if compared:
        return compared, [table]
    return [], [f"no evaluation compares {candidate.manifest} with {alias} {present.manifest}"]
