"""Images that episodes have shown, as files of the store: checkpoints name them, and any node may resume."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from rlhf_core.contract import StageContext


class ShownFiles:
    """The files of `folder`, where episodes.shown_images.ShownImages keeps each under its SHA-256."""

    def __init__(self, folder: Path, context: StageContext) -> None:
        self.folder = folder
        self._context = context
        self._stored: set[str] = set()

    def put(self, digests: Iterable[str]) -> None:
        """Store the files, each once. Those that are not in the folder are images of rows, whose dataset has them."""
        new = {digest for digest in digests if digest not in self._stored and (self.folder / digest).is_file()}
        if new:
            with TemporaryDirectory(dir=self._context.workdir) as part:
                for digest in new:
                    os.link(self.folder / digest, Path(part) / digest)
                self._context.put_files(Path(part))
            self._stored |= new

    def get(self, digests: Iterable[str]) -> None:
        """Fetch the files that another job has stored. Raises StoreError for one that is gone, IntegrityError for one
        that is damaged.
        """
        missing = {digest: digest for digest in digests if not (self.folder / digest).is_file()}
        self._context.get_files(missing, self.folder)
        self._stored.update(missing)
