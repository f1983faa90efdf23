"""Word problems, to be solved with a calculator."""

from environments.calculator.environment import Calculator, CalculatorConfig

__all__ = ["Calculator", "CalculatorConfig"]
