"""The exceptions a caller may catch. Every message says what was wrong, where, and what to do next."""


class AlignmentError(Exception):
    """Base of every error that this system raises on purpose."""


class RecipeError(AlignmentError):
    """A recipe, an override or a file it names is wrong; nothing has been started."""


class StoreError(AlignmentError):
    """The artifact store cannot be reached or cannot do what the contract needs."""


class ConflictError(StoreError):
    """A conditional write lost: the object exists already, or changed since it was read."""


class IntegrityError(StoreError):
    """Stored bytes do not match the digest that names them."""


class StageError(AlignmentError):
    """A stage could not finish; no artifact was published from it."""


class RewardError(StageError):
    """A reward raised, timed out, was not finite, or had the wrong number of values."""


class WeightSyncError(StageError):
    """An engine does not serve the weights that were published to it."""


class StackError(AlignmentError):
    """A service of the local stack could not be started, reached or stopped."""
