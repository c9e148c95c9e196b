"""The tracker TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class TensorBoard:
    """Event files, written by TensorBoard's own writer: that of torch would load torch into every job."""

    def __init__(self, folder: Path):
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder))

    def log(self, step: int, unix_time: float, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(step=step, wall_time=unix_time, summary=Summary(value=values)))

    def close(self) -> None:
        self._writer.close()
