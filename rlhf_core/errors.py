"""The exceptions that a caller may catch. Every message names the fault, its place and the remedy."""

import difflib
import re
from collections.abc import Iterable

_ADDRESS = re.compile(r"(<[^<>]*?)(?: object)? at 0x[0-9a-fA-F]+")  # as in Python's default repr
_LONGEST_REASON = 500  # characters
_LONGEST_COMPARED = 200  # characters: comparing takes time with the square of them


class AlignmentError(Exception):
    """Base of every error that this system raises on purpose."""


class RecipeError(AlignmentError):
    """A recipe, an override or a file that the recipe names is wrong; nothing has been started."""


class VariableError(AlignmentError):
    """An environment variable of this system, ALIGNMENT_…, has a value that cannot be used."""


class PluginError(AlignmentError):
    """An installed plugin cannot be used, or is not the one that a run was started with."""


class StoreError(AlignmentError):
    """The artifact store cannot be reached, or does not provide what the contract requires."""


class ConflictError(StoreError):
    """A conditional write failed: the object exists already, or has changed since it was read."""


class IntegrityError(StoreError):
    """Stored bytes do not match the digest that names them."""


class StageError(AlignmentError):
    """A stage failed; it has published no artifact."""


class ActorDiedError(StageError):
    """The process of a rank or an engine died, on a node that lives."""


class StoppedError(StageError):
    """A stage was stopped between two steps; it resumes from its newest checkpoint."""


class PreemptedError(StoppedError):
    """A stage was stopped since a node of it is taken away; it is to resume on others."""


class StuckError(StoppedError):
    """A stage was stopped since a phase of it had hung; it is to resume, unless it has done so too often."""


class NothingLeftError(StageError):
    """A stage cannot use any of its completions; those of other prompts may be usable."""


class ConversationError(StageError):
    """The chat template cannot render this row as it is; it may render others."""


class EpisodeError(StageError):
    """An environment raised an error, hung, died, or returned an unusable value."""


class RewardError(StageError):
    """A reward raised an error, timed out, was not finite, or returned the wrong number of values."""


class WeightSyncError(StageError):
    """An engine does not serve the published weights."""


class StackError(AlignmentError):
    """A service of the local stack could not be started, reached or stopped."""


def shortened(text: str, characters: int) -> str:
    """Truncate `text` to so many characters, and append an ellipsis."""
    return text if len(text) <= characters else f"{text[:characters]}…"


def one_line(text: str) -> str:
    """Escape `text` for one line: line ends, control characters and broken Unicode."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def without_addresses(text: str) -> str:
    """Remove addresses of objects in memory from `text`: they carry no information and differ from run to run."""
    return _ADDRESS.sub(r"\1", text)


def reason_of(error: BaseException) -> str:
    """Format a library's exception as a part of a sentence: its message in one line, or its type if it has none."""
    message = one_line(without_addresses(" ".join(str(error).split())))
    return shortened(message, _LONGEST_REASON) or type(error).__name__


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return a suggestion in parentheses, to append to an unknown name; empty if no known name is similar."""
    near = similar_name(wrong, known)
    return "" if near is None else f" (did you mean `{near}`?)"


def similar_name(wrong: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to an unknown one; None if none is."""
    names, written = {name.lower(): name for name in known}, wrong.lower()[:_LONGEST_COMPARED]
    # To difflib two swapped characters are as far away as one other character: gpro as near to gspo as to grpo.
    nearest = [name for name in names if _is_swapped(written, name)]
    nearest = nearest or difflib.get_close_matches(written, list(names), n=1, cutoff=0.5)
    return names[nearest[0]] if nearest else None


def _is_swapped(text: str, other: str) -> bool:
    """Return whether the two differ by a transposition of neighbouring characters."""
    if len(text) != len(other) or text == other:
        return False
    first = next(index for index in range(len(text)) if text[index] != other[index])
    return text[:first] + text[first : first + 2][::-1] + text[first + 2 :] == other
