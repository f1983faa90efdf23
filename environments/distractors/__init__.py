"""Office work with many tools and look-alike records, of which few are right."""

from environments.distractors.environment import Distractors, DistractorsConfig

__all__ = ["Distractors", "DistractorsConfig"]
