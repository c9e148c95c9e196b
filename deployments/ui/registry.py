"""A model of the registry as its page shows it, and the moves that the page offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from getpass import getuser

from deployments.ui.reading import StoreReader
from rlhf_core.artifacts.aliases import Alias, alias_names, list_aliases, moves_of
from rlhf_core.artifacts.gates import Gate, read_gate
from rlhf_core.artifacts.manifest import ArtifactRef
from rlhf_core.artifacts.promotion import Decision, approve, decision_on, promote, reject, waiting
from rlhf_core.artifacts.protection import CANDIDATE, CHAMPION, read_protection
from rlhf_core.artifacts.registry import model_before, roll_back
from rlhf_core.artifacts.store import Store
from rlhf_core.errors import StoreError
from rlhf_core.evaluation.verdict import Comparison

Form = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ModelSummary:
    name: str
    champion: Alias | None
    waits: bool  # a candidate waits for a person


@dataclass(frozen=True, slots=True)
class ModelView:
    name: str
    aliases: Mapping[str, Sequence[Alias]]  # with all moves, the newest first
    protected: frozenset[str]
    candidate: Alias | None  # unless it is the champion
    gate: Gate | None  # that passed it
    decision: Decision | None  # on it
    waits: bool
    differences: Sequence[Comparison]  # of the candidate to the champion
    user: str  # by whom moves are kept

    @property
    def champion(self) -> Alias | None:
        moves = self.aliases.get(CHAMPION)
        return moves[0] if moves else None

    @property
    def restored(self) -> ArtifactRef | None:
        """Model that a rollback of the champion restores; None if none is known."""
        moves = self.aliases.get(CHAMPION)
        before = model_before(moves) if moves else None
        return None if before is None else before[1]

    @property
    def action(self) -> str:
        """Action on the candidate that the page offers: `approve` (or reject), `promote`, or empty."""
        if self.candidate is None or (self.decision is not None and not self.decision.approved):
            return ""
        return "approve" if self.waits else "promote"


def summaries(store: Store) -> list[ModelSummary]:
    """Return all models, sorted by name."""
    names = sorted({model for model, _ in alias_names(store)})
    return [
        ModelSummary(name, moves[0] if (moves := moves_of(store, name, CHAMPION)) else None, bool(waiting(store, name)))
        for name in names
    ]


@dataclass(frozen=True, slots=True)
class AliasOfModel:
    """An alias that points at a model now."""

    name: str
    move: Alias
    waits: bool  # it is a candidate, which waits for a person

    @property
    def model(self) -> str:
        return self.name.partition("/")[0]


def aliases_of(store: Store, ref: ArtifactRef) -> list[AliasOfModel]:
    """Return the aliases that point at a model now, by their names."""
    moves = {name: move for name, move in list_aliases(store).items() if move.manifest == ref}
    return [AliasOfModel(name, move, _waits(store, name)) for name, move in moves.items()]


def _waits(store: Store, name: str) -> bool:
    model, _, alias = name.partition("/")
    try:
        return alias == CANDIDATE and waiting(store, model) is not None
    except StoreError:  # its gate is gone, so there is nothing to approve
        return False


def read_model(reader: StoreReader, name: str) -> ModelView | None:
    """Return a model; None if it has no alias. Raises StoreError for a name that none can have."""
    store = reader.repository.store
    aliases = {alias: moves_of(store, name, alias) for _, alias in alias_names(store, name)}
    if not aliases:
        return None
    protection = read_protection(store, name)
    candidate = next(iter(aliases.get(CANDIDATE, ())), None)
    champion = next(iter(aliases.get(CHAMPION, ())), None)
    if candidate is not None and champion is not None and candidate.manifest == champion.manifest:
        candidate = None
    gate = None if candidate is None or candidate.evidence.gate is None else read_gate(store, candidate.evidence.gate)
    return ModelView(
        name, aliases, frozenset(alias for alias in aliases if protection.protects(alias)), candidate, gate,
        decision=None if candidate is None else decision_on(store, name, candidate),
        waits=waiting(store, name) is not None,
        differences=()
        if candidate is None or champion is None
        else reader.differences(champion.manifest, candidate.manifest),
        user=getuser(),
    )  # fmt: skip


def move(store: Store, model: str, action: str, form: Form) -> None:
    """Move an alias of `model` as a person asks on its page.

    form: `name` of the person and `reason`; `candidate` or `seen`, by which the page that the person has looked at is
    known; `confirmed`, the model that a rollback restores. Raises StoreError if this is refused, ConflictError if the
    page is out of date.
    """
    _MOVES[action](store, model, form)


def _expected(form: Form) -> ArtifactRef:
    stage, _, key = form.get("candidate", "").partition("/")
    return ArtifactRef(stage=stage, key=key)


def _approve(store: Store, model: str, form: Form) -> None:
    who, reason = _named(form), form.get("reason", "")
    approve(store, model, by=getuser(), approved_by=who, reason=reason, expected=_expected(form))


def _reject(store: Store, model: str, form: Form) -> None:
    reject(store, model, by=_named(form), reason=form.get("reason", ""), expected=_expected(form))


def _promote(store: Store, model: str, form: Form) -> None:
    who = form.get("name", "").strip()
    promote(store, model, by=getuser(), reason=form.get("reason", ""), approved_by=who, expected=_expected(form))


def _roll_back(store: Store, model: str, form: Form) -> None:
    reason = form.get("reason", "").strip()
    if not reason:
        raise StoreError("give a reason: it is kept with the move")
    before = model_before(moves) if (moves := moves_of(store, model, CHAMPION)) else None
    seen = int(form["seen"])
    if before is not None and moves[0].sequence == seen and form.get("confirmed") != before[1].full:
        raise StoreError(f"confirm that {model}/{CHAMPION} is {before[1]} again")
    roll_back(store, model, by=getuser(), reason=reason, seen=seen)


def _named(form: Form) -> str:
    name = form.get("name", "").strip()
    if not name:
        raise StoreError("give your name: it is kept with the decision")
    return name


_MOVES: Mapping[str, Callable[[Store, str, Form], None]] = {
    "approve": _approve,
    "reject": _reject,
    "promote": _promote,
    "rollback": _roll_back,
}
ACTIONS = frozenset(_MOVES)
