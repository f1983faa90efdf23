"""Word problems that are solved with a calculator tool."""

from environments.calculator.environment import Calculator, CalculatorConfig

__all__ = ["Calculator", "CalculatorConfig"]
