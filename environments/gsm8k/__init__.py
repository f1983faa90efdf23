"""Word problems whose answer is one number: generated ones, or openai/gsm8k; with a calculator, or without."""

from environments.gsm8k.calculator import Calculator, CalculatorConfig
from environments.gsm8k.environment import GSM8K, GSM8KConfig

__all__ = ["GSM8K", "Calculator", "CalculatorConfig", "GSM8KConfig"]
