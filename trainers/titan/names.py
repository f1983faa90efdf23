"""Names of tensors in TorchTitan's models and in Hugging Face's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter


class RenamingStateDictAdapter(Qwen3StateDictAdapter):  # type: ignore[misc]
    """TorchTitan's adapter for Qwen 3 with more names; subclasses map Hugging Face's to TorchTitan's.

    Names in `block_names` are relative to the block.
    """

    names: ClassVar[Mapping[str, str]] = {}
    block_names: ClassVar[Mapping[str, str]] = {}

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        blocks = {f"model.layers.{{}}.{theirs}": f"layers.{{}}.{ours}" for theirs, ours in self.block_names.items()}
        self.from_hf_map |= {**self.names, **blocks}

    def _validate_hf_rope_config(self, expected: Any) -> None:
        """Skip TorchTitan's check: `check_hf_config` has checked the rotary positions of every block."""
