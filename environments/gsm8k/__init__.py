"""Word problems whose answer is one number: generated ones, or the dataset openai/gsm8k."""

from environments.gsm8k.environment import GSM8K, GSM8KConfig

__all__ = ["GSM8K", "GSM8KConfig"]
