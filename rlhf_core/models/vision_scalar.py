"""Classes with a score head for architectures that read images, of which transformers has one for few."""

from __future__ import annotations

from functools import cache
from typing import Any

_CAUSAL, _SCALAR = "ForConditionalGeneration", "ForSequenceClassification"


@cache
def scalar_class(config: type[Any]) -> Any:
    """Return a sequence classifier of the architecture that reads images with configs of the class `config`.

    Its layers have the names of the causal model's, in memory and on disk, so that it loads from the folder of one.
    """
    # Not at the top: drivers, which run no model, load without the classes of models.
    import transformers
    from transformers import conversion_mapping
    from transformers.modeling_layers import GenericForSequenceClassification

    causal: Any = transformers.AutoModelForImageTextToText._model_mapping[config]
    base = next(kind for kind in causal.__mro__ if transformers.PreTrainedModel in kind.__bases__)
    name = causal.__name__.removesuffix(_CAUSAL) + _SCALAR
    if (renamed := conversion_mapping.get_checkpoint_conversion_mapping(causal.__name__)) is not None:
        conversion_mapping.register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    # Names on disk are mapped by model_type too, for classes of transformers alone.
    body = {"config_class": config, "__module__": causal.__module__}
    return type(name, (GenericForSequenceClassification, base), body)
