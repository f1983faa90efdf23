"""How many bytes of tensors are alive, at any moment: of real tensors and of fake ones alike."""

from __future__ import annotations

import weakref
from typing import Any, Self
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """While it is entered, the storages that operations make are counted as long as anything holds them.

    Storages that FSDP empties and fills again count by their size at each moment.

    Attributes:
        now: bytes alive.
        peak: the most so far; set it to `now` to begin anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.now = self.peak = 0

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._count(storage._cdata, storage.nbytes())
            return result

        self._patched = patch.object(torch.UntypedStorage, "resize_", resized)
        self._patched.start()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patched.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operations on local tensors come by again
        result = func(*args, **(kwargs or {}))
        for item in tree_iter(result):
            if isinstance(item, torch.Tensor):
                self.add(item)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
            self._count(key, storage.nbytes())

    def _count(self, key: int, size: int) -> None:
        self.now += size - self._sizes.get(key, 0)
        self.peak = max(self.peak, self.now)
        self._sizes[key] = size

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        del self._references[key]
