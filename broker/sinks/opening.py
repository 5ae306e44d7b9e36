"""Opens the sink of a target."""

from __future__ import annotations

from pathlib import Path

from broker.sinks.sink import Identity, Sink
from broker.sinks.target import Kind, Target


def open_sink(target: Target, identity: Identity) -> Sink:
    """Opens a run in a library, which is imported here; raises whatever that raises."""
    match target.kind:
        case Kind.TENSORBOARD:
            from broker.sinks.tensorboard import TensorBoardSink

            return TensorBoardSink(Path(target.place), identity)
        case Kind.WANDB:
            from broker.sinks.wandb import WandbSink

            return WandbSink(target.place, identity)
        case Kind.MLFLOW:
            from broker.sinks.mlflow import MlflowSink

            return MlflowSink(target.place, identity)
