"""Ready-made reward functions for rubrics.

Each is a callable `(prompt, response, target) -> float`, or takes fewer of these parameters, so it works in a
`fe.Rubric`, in a reward actor, and when called directly.
"""

from forge_env.rewards.code import CodeTests, extract_code
from forge_env.rewards.ensemble import Ensemble, estimate_accuracies
from forge_env.rewards.judge import JudgeReward
from forge_env.rewards.math import MathReward, parse_number
from forge_env.rewards.reasons import explain
from forge_env.rewards.text import ExactMatch, FormatReward, FuzzyMatch, ThinkingReward, exact_match, fuzzy_match

__all__ = [
    "CodeTests",
    "Ensemble",
    "ExactMatch",
    "FormatReward",
    "FuzzyMatch",
    "JudgeReward",
    "MathReward",
    "ThinkingReward",
    "estimate_accuracies",
    "exact_match",
    "explain",
    "extract_code",
    "fuzzy_match",
    "parse_number",
]
