"""Parameters are still those that were sharded: trained or frozen as then, over the memory of their bucket."""

from __future__ import annotations

from collections.abc import Sequence

from fxshard._torch import private
from fxshard._torch.errors import StateError
from fxshard.frontend.state import places
from fxshard.runtime.bucket import Bucket


class ParameterIdentity:
    """Looked at before every forward: two lists, compared as a whole."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._names = [name for _, name, _ in places(buckets)]
        self._parameters = [parameter for _, _, parameter in places(buckets)]
        self._trained = [bucket.plan.trainable for bucket, _, _ in places(buckets)]
        self._storages = [private.storage_address(parameter) for parameter in self._parameters]

    def check(self) -> None:
        """Raise ``StateError`` if a parameter is trained that was frozen, or its memory was replaced."""
        if [parameter.requires_grad for parameter in self._parameters] != self._trained:
            self._refuse_trained()
        if [private.storage_address(parameter) for parameter in self._parameters] != self._storages:
            self._refuse_replaced()

    def _refuse_trained(self) -> None:
        for name, parameter, trained in zip(self._names, self._parameters, self._trained, strict=True):
            if parameter.requires_grad != trained:
                raise StateError(
                    f"{name!r} was {'trained' if trained else 'frozen'} when the model was sharded; "
                    "set requires_grad on the plain model, before fxshard.compile"
                )

    def _refuse_replaced(self) -> None:
        for name, parameter, storage in zip(self._names, self._parameters, self._storages, strict=True):
            if private.storage_address(parameter) != storage:
                raise StateError(
                    f"{name!r} was given other memory (parameter.data = ...), but a sharded parameter is a view of its "
                    "bucket, and that was not changed: write values with parameter.copy_() below torch.no_grad(), or "
                    "with load_state_dict; this model cannot be used any more"
                )
