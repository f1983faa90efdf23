"""Creation of the loss named in a recipe."""

from __future__ import annotations

from forge_env.config.reader import make_plugin
from forge_env.config.recipe import LossSection
from trainers.losses.padded import PaddedLoss, is_padded
from trainers.losses.types import Loss

GROUP = "forge_env.losses"


def make_loss(section: LossSection) -> Loss:
    """Create the loss that a recipe names, by entry point or `module:Class`, with its options."""
    name = section.name
    loss = make_plugin(GROUP, name, section.options, name_at="grpo.loss.name", options_at="grpo.loss.options")
    made: Loss = PaddedLoss(loss, name) if is_padded(loss) else loss
    return made
