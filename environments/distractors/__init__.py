"""Office jobs with many tools and look-alike records, only a few of which are needed."""

from environments.distractors.environment import Distractors, DistractorsConfig

__all__ = ["Distractors", "DistractorsConfig"]
