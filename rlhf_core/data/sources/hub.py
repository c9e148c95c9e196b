"""Data sets of the Hugging Face hub, at the commit of the plan."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_core.config.data.sources import HubSource
from rlhf_core.contract import StageContext
from rlhf_core.data.sources.arrow_rows import without_added_nulls
from rlhf_core.data.sources.base import BadRow, Located, RowSource
from rlhf_core.errors import StageError, reason_of


class HubDataset(RowSource[HubSource]):
    def rows(self, context: StageContext, data_format: str, bad_row: BadRow) -> Iterator[Located]:
        import datasets

        source = self.config
        revision = context.pin(source.url) or source.revision
        name = source.repository if source.subset is None else f"{source.repository}/{source.subset}"
        try:
            rows = datasets.load_dataset(
                source.repository,
                name=source.subset,
                split=source.split,
                revision=revision,
                streaming=source.streaming,
            )
            for index, row in enumerate(rows):
                yield f"{name} row {index}", without_added_nulls(row)
        except Exception as error:  # the library raises many types; all mean that this source cannot be had
            raise StageError(f"{name}, split {source.split}, revision {revision}: {reason_of(error)}") from error
